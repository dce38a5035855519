"""A package that is not there for tests: jsonschema builds its grammar for two seconds in every process that loads nbformat."""

raise ImportError("tests do without it: no notebook has an address to be checked by its grammar")
