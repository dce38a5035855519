"""Operations on nested tensors, within and between processes."""
