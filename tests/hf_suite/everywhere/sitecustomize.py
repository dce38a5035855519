"""Where this folder is on the path, every Python process begins with `accelerate` being this package."""

from tests.hf_suite.alias import install

install()
