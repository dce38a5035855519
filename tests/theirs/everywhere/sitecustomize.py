"""Where this folder is on the path, every Python process begins with `accelerate` being this package."""

from tests.theirs.alias import install

install()
