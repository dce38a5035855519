"""Whatever function a notebook has made runs on every process, with all that it uses."""

from __future__ import annotations

from tests.kernel.kernels import Kernel


def test_classes_of_cells_travel_there_and_back_and_between_ranks(kernel: Kernel) -> None:
    kernel.ok("""
    from dataclasses import dataclass
    import torch.distributed as dist

    @dataclass
    class Score:
        rank: int

    class Better(Score):
        def __init__(self, rank):
            super().__init__(rank)

    def exchanged(first):
        assert isinstance(first, Score)
        dist.init_process_group("gloo")
        everyone = [None] * dist.get_world_size()
        # torch uses the plain pickle, which looks classes up by their names
        dist.all_gather_object(everyone, Better(dist.get_rank() + first.rank))
        assert all(isinstance(one, Better) for one in everyone)
        return everyone

    came = notebook_launcher(exchanged, (Score(10),), num_processes=2)
    """)
    assert kernel.value("[one.rank for one in came]") == [10, 11]
    assert kernel.value("all(isinstance(one, Better) for one in came)")


def test_what_cannot_travel_is_found_inside_of_what_is_captured(kernel: Kernel) -> None:
    cell = kernel.run("""
    import threading
    class Holder:
        def __init__(self):
            self.settings = {"guard": threading.Lock()}
    holder = Holder()
    notebook_launcher(lambda: holder, num_processes=2)
    """)
    assert cell.error is not None
    assert cell.error.name == "PayloadError"
    for part in ("holder", ".settings", "guard", "_thread.lock", f"Cell In[{cell.number}], line 6"):
        assert part in cell.error.text
