"""The import path `accelerate.utils.torch_xla`, of which nothing is offered: the extra `tpu` installs torch_xla."""
