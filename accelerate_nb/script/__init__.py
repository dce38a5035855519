"""The runtime of exported scripts: each file is imported by the scripts that need it."""

# Scripts are run by later versions than the one that wrote them: what they call keeps its name, its arguments and its
# meaning (tests/script/test_names.py).
