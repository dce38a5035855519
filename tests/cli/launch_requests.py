"""What the command line of a launch requests."""

from accelerate_nb.cli.commands import launch
from accelerate_nb.cli.launching.request import PROG, LaunchRequest, read_request
from accelerate_nb.cli.parser import CliParser


def read(*words: str) -> tuple[LaunchRequest, list[str]]:
    """The request of these words, and what is launched."""
    parser = CliParser(prog=PROG)
    launch.configure(parser)
    arguments = parser.parse_args(list(words))
    launch._take_seconds(arguments)
    return read_request(arguments), arguments.what


def request_of(*words: str) -> LaunchRequest:
    """The request of these words for a script."""
    return read(*words, "script.py")[0]
