"""The self-test's share of a worker: the checks of the Accelerator that runs there."""


def run_checks_on_rank() -> None:
    """Make every check of the self-test on this rank, each reported as a display of the run."""
    from accelerate_nb.runtime.observability.self_test import run_checks

    run_checks()
