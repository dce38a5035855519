"""How a training is saved and resumed."""
