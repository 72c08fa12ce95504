"""The main job on the real small model, from HTTP to the kernel's count of memory."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import openai
import pytest
from e2e.readme import blocks, commands
from e2e.serving import Server

from torpor.service.walkthrough.memory import page_bytes

MIB = 1 << 20
KV_BYTES = 512 * MIB
QUESTION = (
    "A train leaves the station at nine in the morning and travels for three hours at sixty kilometres an hour. "
    "How far does it go? Explain your answer in one short sentence, and name the formula that you used."
)
CAPITAL = "What is the capital of France?"


def kernel_bytes(model: dict[str, object]) -> int:
    """The kernel's count of the ranks' pages; nobody else on the machine is in it."""
    ranks = model["ranks"]
    assert isinstance(ranks, list)
    return page_bytes({rank["pid"] for rank in ranks})


def tag_bytes(model: dict[str, object], tag: str, what: str = "device_bytes") -> int:
    ranks = model["ranks"]
    assert isinstance(ranks, list)
    return sum(row[what] for rank in ranks for row in rank["memory"] if row["tag"] == tag)


def answer(server: Server, question: str = QUESTION) -> tuple[str, int]:
    """The answer's text, as the openai package reads it, and how many of the prompt's tokens were cached."""
    with openai.OpenAI(api_key="none", base_url=f"{server.url}/v1", max_retries=0) as client:
        told = client.chat.completions.create(
            model=server.model_name(),
            messages=[{"role": "user", "content": question}],
            temperature=0,
            max_tokens=24,
        )
    assert told.usage is not None
    assert told.usage.prompt_tokens_details is not None
    return told.choices[0].message.content or "", told.usage.prompt_tokens_details.cached_tokens or 0


@pytest.mark.parametrize(
    ("mode", "kept"), [("cpu", True), ("pinned", True), ("none", False), ("memset", False)]
)
def test_the_kernel_has_the_memory_back_while_asleep_and_the_answer_is_the_same_after_wake(
    server: Server, mode: str, kept: bool
) -> None:
    """M1, K1, K2, K3, S1, F11: bytes by the kernel's count, token-exact answers, cached_tokens by mode."""
    assert "Paris" in answer(server, CAPITAL)[0]
    first, _ = answer(server)
    again, cached_before = answer(server)
    assert again == first
    assert cached_before > 0
    awake = server.model()
    mapped = tag_bytes(awake, "kv_cache") + tag_bytes(awake, "weights")
    assert tag_bytes(awake, "kv_cache") == KV_BYTES
    assert tag_bytes(awake, "weights") > 400 * MIB
    before = kernel_bytes(awake)

    body = {"restore": {"kv_cache": mode, "weights": "pinned"}}
    slept = server.http.post("/sleep", json=body).raise_for_status().json()
    assert slept["state"] == "succeeded"
    asleep = server.model()
    fell = before - kernel_bytes(asleep)
    residual = tag_bytes(asleep, "weights", "residual_bytes")
    assert 0 < residual <= 4 * MIB, "module buffers stay (S3), and nothing else"
    assert fell == mapped - residual, f"the kernel's count fell by {fell}, mapped were {mapped}"
    assert sum(rank["freed_bytes"] for rank in slept["ranks"]) == mapped - residual
    assert asleep["state"] == "asleep"
    assert asleep["parked_tags"] == ["kv_cache", "weights"]

    refused = server.chat(QUESTION)
    assert refused.status_code == 503, refused.text
    assert int(refused.headers["Retry-After"]) > 0
    assert refused.json()["code"] == "gate_closed"

    woken = server.http.post("/wake", json={}).raise_for_status().json()
    assert woken["state"] == "succeeded"
    assert kernel_bytes(server.model()) == before
    text, cached = answer(server)
    assert text == first
    assert cached == (cached_before if kept else 0)
    assert "Paris" in answer(server, CAPITAL)[0]


def test_sleeping_twice_and_waking_twice_succeeds_and_changes_nothing(server: Server) -> None:
    """C1, F20."""
    first = server.http.post("/sleep", json={}).raise_for_status().json()
    generation = server.model()["generation"]
    second = server.http.post("/sleep", json={}).raise_for_status().json()
    audit = server.http.get("/audit", params={"limit": 2}).raise_for_status().json()["audit"]
    assert [entry["operation"] for entry in audit] == [second["id"], first["id"]]
    assert (first["state"], second["state"]) == ("succeeded", "succeeded")
    assert sum(rank["freed_bytes"] for rank in second["ranks"]) == 0
    assert server.model()["generation"] == generation
    for _ in range(2):
        assert server.http.post("/wake", json={}).raise_for_status().json()["state"] == "succeeded"
    assert server.model()["state"] == "awake"


def test_waking_a_subset_leaves_the_gate_closed_until_nothing_is_parked(server: Server) -> None:
    """C3, F4."""
    server.http.post("/sleep", json={}).raise_for_status()
    server.http.post("/wake", json={"tags": ["weights"]}).raise_for_status()
    half = server.model()
    assert (half["state"], half["parked_tags"]) == ("asleep", ["kv_cache"])
    assert server.chat(QUESTION).status_code == 503
    server.http.post("/wake", json={"tags": ["kv_cache"]}).raise_for_status()
    assert server.chat(QUESTION).status_code == 200


def test_weights_woken_without_contents_are_not_served_until_they_are_read_again(server: Server) -> None:
    """C9, F27."""
    first, _ = answer(server)
    discard = {"restore": {"weights": "none", "kv_cache": "none"}}
    server.http.post("/sleep", json=discard).raise_for_status()
    server.http.post("/wake", json={"on_discard": "wait"}).raise_for_status()
    refused = server.chat(QUESTION)
    assert refused.status_code == 503
    assert "contents_undefined" in refused.text
    server.http.post("/sleep", json=discard).raise_for_status()
    woken = server.http.post("/wake", json={}).raise_for_status().json()
    assert woken["reloaded_bytes"] > 400 * MIB
    assert answer(server)[0] == first


# They start what the others ask; examples/shared_gpu.py runs them.
STARTED_ELSEWHERE = ("torpor serve", "torpor apply")


def test_what_the_readme_tells_people_to_type_works_as_it_stands(server: Server) -> None:
    """Every curl and torpor command, in its order, and every Python block."""
    environment = os.environ | {
        "TORPOR_URL": server.url,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    asked = [one for one in commands() if not one.startswith(STARTED_ELSEWHERE)]
    assert {one.split()[0] for one in asked} == {"curl", "torpor"}
    script = [f'torpor() {{ "{sys.executable}" -W ignore -m torpor.service.cli "$@"; }}', "set -ex"]
    for command in asked:
        script.append(
            command.replace("curl -s", "curl -sS --fail-with-body").replace("localhost:8700", server.url)
        )
    done = subprocess.run(
        ["bash", "-c", "\n".join(script)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Paris" in done.stdout
    assert "sleep of smollm2: succeeded" in done.stdout
    programs = blocks("python")
    assert len(programs) == 2
    for program in programs:
        here = program.replace("Client()", f'Client("{server.url}")')
        ran = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", here],
            env=environment,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert ran.returncode == 0, ran.stderr
        assert "Client" not in program or re.search(r"'[^']+': \d{6,}", ran.stdout), ran.stdout
    assert server.model()["state"] == "awake"
