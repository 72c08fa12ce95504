"""Every command, with the service in this process: what it asks for, what it shows, and what it exits with."""

from __future__ import annotations

import io
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from service_inside import Inside, inside

from torpor.actors.coordinator.memory import Fault
from torpor.service import Client
from torpor.service.cli import main
from torpor.service.cli.following import following
from torpor.service.cli.main import COMMANDS

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def house(tmp_path: Path) -> Iterator[Inside]:
    with inside(tmp_path, {"chat": 2, "draft": 1}, making=True) as made:
        with made.client() as client:
            while any(model["state"] != "awake" for model in client.models()):
                time.sleep(0.01)
        yield made


@pytest.fixture
def torpor(house: Inside, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("COLUMNS", "200")

    def connect(url: str, **options: Any) -> Client:
        return house.client()

    def run(*arguments: str) -> tuple[int, str, str]:
        code = main(arguments, connect)
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return code, captured.out, captured.err

    return run


def state(torpor: Run, model: str = "chat") -> str:
    (only,) = json.loads(torpor("status", model, "--json")[1])["models"]
    return f"{only['state']}, {only['gate']['reason'] or 'open'}"


def test_sleep_and_wake_take_all_that_a_request_may_say(torpor: Run) -> None:
    wishes = ("--tag", "kv_cache", "--restore", "kv_cache=cpu", "--drain", "abort", "--drain-timeout", "3")
    more = ("--overflow", "evict", "--verify", "--timeout", "20", "--on-conflict", "wait", "--json")
    code, out, _ = torpor("sleep", "chat", *wishes, *more)
    record = json.loads(out)
    assert (code, record["tags"], record["restore"]) == (0, ["kv_cache"], {"kv_cache": "cpu"})
    assert state(torpor) == "asleep, asleep"
    code, out, _ = torpor("wake", "chat", "--tag", "kv_cache", "--make-room", "idle", "--on-conflict", "wait")
    assert (code, "wake of chat: succeeded" in out) == (0, True)
    assert state(torpor) == "awake, open"


def test_trim_gives_back_what_each_rank_keeps_beyond_a_size_m8(torpor: Run) -> None:
    code, out, _ = torpor("trim", "chat", "--keep", "1KiB", "--json")
    record = json.loads(out)
    assert (code, record["model"], [one["rank"] for one in record["ranks"]]) == (0, "chat", [0, 1])
    code, out, _ = torpor("trim", "draft")
    assert (code, "draft: " in out, "given back" in out) == (0, True, True)


def test_trim_wants_a_model_that_there_is_and_a_size_that_it_can_read(torpor: Run) -> None:
    for wrong, hint in (
        ((), "chat, draft"),
        (("nobody",), "nobody"),
        (("chat", "--keep", "2 cows"), "512MiB"),
    ):
        code, out, told = torpor("trim", *wrong)
        assert (code, out) == (2, "")
        assert hint in told


def test_a_trim_that_a_rank_does_not_answer_exits_with_3_and_says_which(torpor: Run, house: Inside) -> None:
    house.rig.rank(rank=1).die()
    code, out, told = torpor("trim", "chat", "--json")
    assert (code, json.loads(out)["code"], "rank 1" in told) == (3, "rank_failed", True)


def test_a_pause_lets_nobody_in_until_the_unpause_and_touches_no_memory(torpor: Run) -> None:
    code, out, _ = torpor("pause", "chat", "--drain", "abort")
    assert (code, "pause of chat: succeeded" in out) == (0, True)
    assert state(torpor) == "awake, paused"
    code, out, _ = torpor("unpause", "chat", "--json")
    assert (code, json.loads(out)["kind"]) == (0, "unpause")
    assert state(torpor) == "awake, open"


def test_recover_and_delete_replace_and_end_a_model(torpor: Run, house: Inside) -> None:
    assert torpor("recover", "draft", "--json")[0] == 0
    code, out, _ = torpor("delete", "draft", "--drain", "abort", "--drain-timeout", "2")
    assert (code, "delete of draft: succeeded" in out) == (0, True)
    assert [one["name"] for one in json.loads(torpor("status", "--json")[1])["models"]] == ["chat"]


def test_an_update_tells_its_version_and_a_plan_writes_nothing(torpor: Run) -> None:
    """C8, C10."""
    assert "plan of update" in torpor("update-weights", "chat", "/weights/new", "--dry-run")[1]
    assert json.loads(torpor("update-weights", "chat", "/weights/new", "--json")[1])["weights_version"] == 1


def test_an_operation_can_be_begun_watched_and_cancelled(torpor: Run, house: Inside) -> None:
    for rank in (0, 1):
        house.rig.rank(rank=rank).delay_s["stage"] = 5.0
    code, out, _ = torpor("sleep", "chat", "--no-wait", "--json")
    begun = json.loads(out)
    assert (code, begun["state"]) == (0, "running")
    assert begun["id"] in torpor("ops", "chat")[1]
    assert torpor("sleep", "chat", "--tag", "weights")[0] == 3, "in conflict with the one that runs"
    code, out, _ = torpor("cancel", begun["id"])
    assert (code, "rejected" in out) == (0, True)
    assert state(torpor) == "awake, open"
    assert torpor("cancel", begun["id"])[0] == 3
    assert torpor("cancel", "nothing")[0] == 2


def test_events_are_told_as_they_come_and_again_from_an_id(
    torpor: Run, house: Inside, capsys: pytest.CaptureFixture[str]
) -> None:
    def connect(url: str, **options: Any) -> Client:
        return house.client()

    reader = threading.Thread(target=main, args=(["events", "chat", "--count", "3", "--json"], connect))
    reader.start()
    while not house.readers():
        time.sleep(0.01)
    with house.client() as client:
        client.sleep("draft")
        client.sleep("chat")
    reader.join(10)
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(events) == 3
    assert {event["data"].get("name") or event["data"]["model"] for event in events} == {"chat"}
    code, out, _ = torpor("events", "chat", "--since", events[0]["id"], "--count", "2")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == [event["id"] for event in events[1:]]


def test_audit_lists_who_changed_what(torpor: Run) -> None:
    torpor("sleep", "chat")
    code, out, _ = torpor("audit", "--limit", "1")
    assert code == 0
    assert "POST /models/{model}/sleep" in out
    assert json.loads(torpor("audit", "--json")[1])["audit"][0]["status"] == 200


def test_a_refused_operation_exits_with_3_and_is_whole_in_json(torpor: Run, house: Inside) -> None:
    house.rig.rank().fault("preflight", Fault.REFUSE, times=100)
    code, out, err = torpor("sleep", "chat", "--json")
    problem = json.loads(out)
    assert (code, problem["status"], problem["operation"]["state"]) == (3, 409, "rejected")
    assert err.startswith("torpor: sleep of 'chat' rejected")
    code, out, err = torpor("sleep", "chat")
    assert (code, out) == (3, "")


def test_a_failed_operation_exits_with_1(torpor: Run, house: Inside) -> None:
    house.rig.rank().fault("commit", Fault.REFUSE, times=100)
    code, _, err = torpor("sleep", "chat")
    assert (code, "failed" in err) == (1, True)


def without_colours(drawn: io.StringIO) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", drawn.getvalue())


def test_progress_names_the_phase_while_an_operation_lasts_and_is_gone_after_it(house: Inside) -> None:
    for rank in (0, 1):
        house.rig.rank(rank=rank).delay_s["stage"] = 1.0
    drawn = io.StringIO()
    console = Console(file=drawn, force_terminal=True, width=100)
    with house.client() as client, following(client, "sleep", "chat", shown=True, console=console):
        client.sleep("chat")
    text = without_colours(drawn)
    assert "sleep chat: stage, 0 of 2 ranks" in text
    assert drawn.getvalue().endswith("\x1b[2K"), "the last that is drawn takes it away"


def test_progress_is_a_line_for_each_step_where_there_is_no_terminal(house: Inside) -> None:
    """Which ranks have a phase behind them is told while others have it before them."""
    house.rig.rank(rank=0).delay_s["stage"] = 0.5
    house.rig.rank(rank=1).delay_s["stage"] = 1.5
    console = Console(file=io.StringIO(), width=40)
    with house.client() as client, following(client, "sleep", "chat", shown=True, console=console):
        client.sleep("chat")
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert lines[:2] == [f"torpor: sleep chat: stage, {done} of 2 ranks" for done in (0, 1)]
    assert len(lines) == len(set(lines)), "nothing is said twice"


def test_several_operations_of_one_call_have_a_bar_each(house: Inside) -> None:
    for model in ("chat", "draft"):
        house.rig.rank(model).delay_s["stage"] = 1.0
    drawn = io.StringIO()
    console = Console(file=drawn, force_terminal=True, width=100)
    with house.client() as client, following(client, "sleep", "*", shown=True, console=console):
        client.sleep("*")
    assert "sleep chat: stage, 1 of 2 ranks" in without_colours(drawn)
    assert "sleep draft: stage" in without_colours(drawn)


@pytest.mark.parametrize("shown", [True, False])
def test_no_progress_is_drawn_for_scripts_or_short_work(house: Inside, shown: bool) -> None:
    drawn = io.StringIO()
    console = Console(file=drawn, force_terminal=shown, width=100)
    with house.client() as client, following(client, "sleep", "chat", shown=True, console=console):
        client.sleep("chat")
    assert drawn.getvalue() == ""


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_are_offered_a_completion(torpor: Run, monkeypatch: pytest.MonkeyPatch, shell: str) -> None:
    monkeypatch.setenv("_TORPOR_COMPLETE", f"source_{shell}")
    code, out, _ = torpor()
    assert (code, "_TORPOR_COMPLETE=complete" in out or "_TORPOR_COMPLETE complete" in out) == (0, True)


def complete(torpor: Run, monkeypatch: pytest.MonkeyPatch, line: str) -> list[str]:
    monkeypatch.setenv("_TORPOR_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(len(line.split(" ")) - 1))
    return torpor()[1].split()


def test_commands_and_models_are_completed(torpor: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert complete(torpor, monkeypatch, "torpor un") == ["unpause"]
    assert complete(torpor, monkeypatch, "torpor sleep ") == ["chat", "draft"]
    assert complete(torpor, monkeypatch, "torpor recover d") == ["draft"]


def test_completion_is_silent_where_nobody_answers(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORPOR_URL", "http://127.0.0.1:1")

    def run(*arguments: str) -> tuple[int, str, str]:
        code = main(arguments)
        return (code, *capsys.readouterr())

    assert complete(run, monkeypatch, "torpor wake ") == []


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_command_explains_itself(capsys: pytest.CaptureFixture[str], command: str) -> None:
    code, out = main([command, "--help"]), capsys.readouterr().out
    assert (code, f"torpor {command}" in out) == (0, True)
    assert len(out.splitlines()) > 5


@pytest.mark.parametrize("command", sorted(COMMANDS.keys() - {"serve"}))
def test_every_command_that_ends_with_an_answer_has_json(
    capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert main([command, "--help"]) == 0
    assert "--json" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["status", "ops", "events"])
def test_commands_that_look_at_all_models_do_not_claim_to_take_the_only_one(
    capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert main([command, "--help"]) == 0
    said = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "this model." in said and "may be left out when there is one" not in said
