"""`accelerate-nb join`: this machine as a node of a notebook elsewhere, by the line that the notebook has shown."""

import argparse
import os
import socket
import sys

from accelerate_nb.launching.node_agent.joined_agent import VARIABLE, given_ticket

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


def run(arguments: argparse.Namespace) -> int:
    """Do it; gives the exit code: 0 when the notebook has ended, or this command was interrupted."""
    ticket = given_ticket(arguments.ticket, os.environ)
    # workers inherit the environment
    os.environ.pop(VARIABLE, None)
    # the agent is loaded once there is something to do
    from accelerate_nb.launching.node_agent.joined_agent import JoinedAgent

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
