"""`accelerate-nb join`: this machine as a node of a notebook elsewhere, by the line that the notebook has shown."""

import argparse
import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

from accelerate_nb.errors import ConfigurationError

# The variable of the environment that holds a ticket, for those who want it in no list of processes.
VARIABLE = "ACCELERATE_NB_JOIN"
_EPILOG = f"""\
examples:
  accelerate-nb join TOKEN@10.0.0.1:4000        the line that a launch with engine='join' shows
  accelerate-nb join @ticket.txt --name box     a file that has TOKEN@10.0.0.1:4000
  {VARIABLE}=TOKEN@10.0.0.1:4000 accelerate-nb join

Whoever has the token of a notebook that you join runs code on this machine as you, and so does whoever can change what crosses the
network between: after the token was proved by both, the connection is not encrypted. Ctrl-C ends it.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.epilog = _EPILOG
    parser.add_argument(
        "ticket",
        nargs="?",
        metavar="TOKEN@HOST:PORT",
        help=f"The ticket that the notebook shows, or @FILE that has it; without it, the variable {VARIABLE}.",
    )
    parser.add_argument(
        "--name", metavar="NAME", default=None, help="The name of this machine there; without it, its host name."
    )


def given_ticket(text: str | None, environment: Mapping[str, str]) -> str:
    """The text of a command line's ticket: itself, `@FILE`, or nothing for that of the environment; raises `ConfigurationError` without one."""
    if text is None:
        text = environment.get(VARIABLE)
    if not text:
        raise ConfigurationError(
            f"No ticket was given. Copy the whole line that the notebook has printed (accelerate-nb join TOKEN@HOST:PORT), name a file "
            f"that has it (@FILE), or set {VARIABLE}."
        )
    if text.startswith("@"):
        try:
            text = Path(text[1:]).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(
                f"{text!r} was given, and that file can't be read: {error}. Name the file that has TOKEN@HOST:PORT."
            ) from None
    return text


def run(arguments: argparse.Namespace) -> int:
    """Do it; gives the exit code: 0 when the notebook has ended, or this command was interrupted."""
    text = given_ticket(arguments.ticket, os.environ)
    # workers inherit the environment
    os.environ.pop(VARIABLE, None)
    # the agent is loaded once there is something to do
    from accelerate_nb.launching.node_agent.agent_process import JoinedAgent, JoinTicket

    ticket = JoinTicket.parse(text)

    agent = JoinedAgent(ticket, arguments.name or socket.gethostname())
    notebook = f"notebook at {ticket.endpoint}"
    joined = f"This machine has joined the {notebook} as {agent.name}."
    print(
        f"{joined} It runs that notebook's launches until the notebook ends; Ctrl-C leaves.",
        file=sys.stderr,
        flush=True,
    )
    if agent.serve():
        end = f"The {notebook} has ended, or closed this connection. To join again, run its newest line."
    else:
        end = f"This machine has left the {notebook}."
    print(end, file=sys.stderr, flush=True)
    return 0
