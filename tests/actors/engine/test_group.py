"""Which process group ranks choose, what they agree on, and that a wait for other ranks has an end."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.engine_host import dummy_spec, write_config
from support.engine_ranks import Ranks

from torpor.actors.config import EngineConfig
from torpor.actors.engine import ModelRefused
from torpor.actors.engine.errors import StepLoopDied
from torpor.actors.engine.group import GLOO, NCCL, RankGroup, check_collectives, choose_backend
from torpor.actors.engine.loader import load_model
from torpor.actors.engine.waiting import wait_for
from torpor.actors.rank.addresses import free_addresses


@pytest.mark.parametrize(
    ("offers", "backend"),
    [
        (["GPU-a", "GPU-b"], NCCL),
        (["GPU-a", "GPU-b", "GPU-c", "GPU-d"], NCCL),
        (["GPU-a", "GPU-a"], GLOO),  # they share one, which NCCL refuses
        (["GPU-a", "GPU-b", "GPU-a"], GLOO),
        (["GPU-a", ""], GLOO),
        (["", ""], GLOO),
    ],
)
def test_nccl_adds_up_only_where_each_rank_has_a_gpu_of_its_own(offers: list[str], backend: str) -> None:
    assert choose_backend(offers) == backend


def test_a_setting_of_collectives_that_means_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match="'mpi' is unknown; known: auto, gloo"):
        check_collectives("mpi")
    engine = EngineConfig(model=str(write_config(tmp_path)), load_format="dummy", collectives="mpi")
    with pytest.raises(ModelRefused, match="mpi"):
        load_model(engine, 1, "host")


RANK = """
import sys
from torpor.actors.engine.group import RankGroup
rank, port = int(sys.argv[1]), sys.argv[2]
group = RankGroup(f"127.0.0.1:{port}", rank, 3, 60.0, 10.0)
group.join()
answers = [group.agree("all", True), group.agree("one not", rank != 1), group.agree("none", False)]
group.leave()
print(group.backend, answers)
"""


def test_ranks_agree_only_on_what_all_of_them_say() -> None:
    port = free_addresses("127.0.0.1", 1)[0].rpartition(":")[2]
    words = [sys.executable, "-c", RANK]
    ranks = [
        subprocess.Popen([*words, str(rank), port], stdout=subprocess.PIPE, text=True) for rank in range(3)
    ]
    said = [rank.communicate(timeout=120)[0].strip() for rank in ranks]
    assert said == ["gloo [True, False, False]"] * 3


def test_one_rank_alone_needs_no_group() -> None:
    group = RankGroup("", 0, 1, 1.0, 1.0)
    group.join()
    assert group.agree("anything", True) and not group.agree("anything else", False)
    group.abort()
    group.leave()


def test_a_wait_for_ranks_that_never_come_ends_in_words() -> None:
    answers = iter([False, False, True])
    wait_for(lambda: next(answers), 5.0)
    began = time.monotonic()
    with pytest.raises(StepLoopDied, match=r"not ready within 0\.05 s: another rank"):
        wait_for(lambda: False, 0.05)
    assert 0.05 <= time.monotonic() - began < 2.0


def test_ranks_on_host_devices_say_that_gloo_adds_up_and_that_they_have_no_graphs(tmp_path: Path) -> None:
    config = write_config(tmp_path, num_attention_heads=4, num_key_value_heads=2)
    with Ranks(dummy_spec(config, tensor_parallel=2, cuda_graphs="on")) as ranks:
        assert ranks.call_all("value", "collectives") == [GLOO, GLOO]
        assert ranks.call_all("value", "graphs_off") == ["a host device has none"] * 2
