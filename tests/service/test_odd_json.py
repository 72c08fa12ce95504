"""JSON that parsers disagree about, or choke on, gets an answer of our own in every dialect, and changes nothing."""

from __future__ import annotations

import json
import time

import pytest
from service_rig import Rig

from torpor.service.json_text import MAX_DEPTH, parse_object
from torpor.service.problems import Problem

LONG = "1" * 5000
NATIVE, VLLM, RAY = "/models/chat/sleep", "/m/chat/wake_up", "/m/chat/wakeup"
SGLANG, TENSORRT, OPENAI = "/m/chat/pause_generation", "/m/chat/release_memory", "/v1/completions"
PATHS = (NATIVE, VLLM, RAY, SGLANG, TENSORRT, OPENAI, "/v1/chat/completions", "/m/chat/abort_request")
# (body, status, what detail and hint say)
ODD = {
    "an integer too long for Python": (f'{{"timeout_s": {LONG}}}', 422, "timeout_s", "20 digits"),
    "a negative one, deep inside": (f'{{"a": [1, {{"b": -{LONG}}}]}}', 422, "a.1.b", "20 digits"),
    "one beyond 64 bits": ('{"seed": 123456789012345678901}', 422, "seed", "20 digits"),
    "a huge exponent": ('{"temperature": 1e999}', 422, "temperature", "finite"),
    "digits before a point": (f'{{"temperature": {LONG}.5}}', 422, "temperature", "finite"),
    "NaN": ('{"lease_s": NaN}', 422, "lease_s: NaN", "finite"),
    "-Infinity": ('{"x": [-Infinity]}', 422, "x.0: -Infinity", "finite"),
    "depth": ('{"a": ' + "[" * MAX_DEPTH + "]" * MAX_DEPTH + "}", 422, str(MAX_DEPTH), "flatter"),
    "depth beyond Python's": ('{"a": ' + "[" * 200_000 + "}", 422, str(MAX_DEPTH), "flatter"),
    "depth of objects": ('{"a":' * 1000 + "1" + "}" * 1000, 422, str(MAX_DEPTH), "flatter"),
    "a key twice": ('{"tags": ["weights"], "tags": ["kv_cache"]}', 422, "`tags` is there twice", "once"),
    "a key twice, inside": ('{"a": {"b": 1, "b": true}}', 422, "`b` is there twice", "once"),
    "half a surrogate": ('{"model": "\\udfff"}', 400, "\\udfff", "as both escapes"),
    "half a surrogate as a key": ('{"\\ud800": 1}', 400, "\\ud800", "as both escapes"),
    "half a surrogate in bytes": (b'{"model": "\xed\xa0\x80"}', 400, "byte 11", "UTF-8"),
    "no UTF-8": (b'{"model": "\xff"}', 400, "byte 11", "UTF-8"),
    "UTF-16": ('{"model": "chat"}'.encode("utf-16"), 400, "byte 0", "UTF-8"),
    "a NUL": (b'{"model": "a\x00"}', 400, "valid JSON", "JSON object"),
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", ODD)
async def test_odd_json_is_refused_in_words_of_our_own_in_every_dialect(
    rig: Rig, path: str, name: str
) -> None:
    body, status, says, hint = ODD[name]
    answer = await rig.http.post(path, content=body)
    problem = answer.json()
    assert answer.status_code == status, answer.text
    assert says in problem["detail"] and hint in problem["hint"]
    for leak in ("sys.", "recursion", "codec", "Python", "surrogates not allowed"):
        assert leak not in answer.text
    assert len(answer.content) < 5000
    assert (await rig.http.get("/operations")).json()["operations"] == []


async def test_what_is_merely_unusual_is_taken(rig: Rig) -> None:
    """The same key twice with one value, digits within a text, NUL in a prompt, a byte order mark, 64 bits."""
    said = await rig.http.post(
        OPENAI,
        content='\ufeff{"model": "chat", "model": "chat", "prompt": "3.'
        + LONG
        + ' NaN Infinity 1e999 \\u0000", "seed": 18446744073709551615, "temperature": 1e-400, '
        '"max_tokens": 9223372036854775807}',
    )
    assert said.status_code == 200, said.text
    (asked,) = rig.inference.seen
    assert asked.prompt is not None and asked.prompt.endswith("1e999 \0") and LONG in asked.prompt
    deepest = '{"a": ' + "[" * (MAX_DEPTH - 1) + "]" * (MAX_DEPTH - 1) + "}"
    assert (await rig.http.post(TENSORRT, content=deepest)).status_code == 200


@pytest.mark.parametrize(
    ("call", "status"),
    [
        (f"GET /operations?limit={LONG}", 422),
        ("GET /operations?limit=1e999", 422),
        ("GET /operations?limit=NaN", 422),
        (f"GET /audit?limit=-{LONG}", 422),
        ("GET /operations?model=%00", 404),
        ("GET /operations?model=%ED%A0%80", 404),
        (f"POST /sleep?level={LONG}", 422),
        ("POST /sleep?level=1e999", 422),
        ("POST /sleep?level=%00", 422),
        (f"POST /sleep?mode={LONG}", 422),
        ("POST /sleep?tags=%00", 400),
        ("POST /wake_up?tags=%ED%A0%80", 400),
        ("POST /models/%00/sleep", 404),
        ("POST /models/%ED%A0%80/wake", 404),
        ("GET /models/%F0%9F", 404),
        (f"GET /operations/{LONG}", 404),
        ("POST /operations/%00/cancel", 404),
        ("POST /m/%00/wake_up", 404),
    ],
)
async def test_an_odd_url_is_refused_likewise(rig: Rig, call: str, status: int) -> None:
    method, url = call.split(" ")
    answer = await rig.http.request(method, url)
    assert answer.status_code == status, answer.text
    assert answer.json()["hint"]
    assert "sys." not in answer.text and "Python" not in answer.text


async def test_an_odd_header_is_refused_likewise(rig: Rig) -> None:
    for name, path, status in (("Last-Event-ID", "/events", 400), ("If-Match", "/models/chat/sleep", 422)):
        for value in (f"{LONG}:{LONG}", "NaN", f"1:{LONG}"):
            method = "GET" if path == "/events" else "POST"
            answer = await rig.http.request(method, path, headers={name: value})
            assert answer.status_code == status, answer.text
            assert answer.json()["hint"] and "sys." not in answer.text
    declared = await rig.http.post(NATIVE, content=b"{}", headers={"Content-Length": LONG})
    assert (declared.status_code, declared.json()["code"]) == (413, "body_too_large")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", "m" * 100_000),
        ("tags", ["t" * 100_000]),
        ("restore", {"weights": "w" * 100_000}),
        ("u" * 100_000, 1),
    ],
)
async def test_what_was_sent_is_not_repeated_at_length(rig: Rig, field: str, value: object) -> None:
    answer = await rig.http.post("/sleep", json={field: value})
    assert 400 <= answer.status_code < 500
    assert len(answer.content) < 10_000, answer.text[:500]


def test_large_bodies_of_plain_numbers_are_read_at_the_speed_of_the_parser() -> None:
    """No look at each of a million tokens: the event loop waits for it."""
    raw = json.dumps({"prompt": list(range(1_000_000))}).encode()

    def best(read: object) -> float:
        assert callable(read)
        times = []
        for _ in range(3):
            begun_s = time.perf_counter()
            read(raw)
            times.append(time.perf_counter() - begun_s)
        return min(times)

    assert best(parse_object) < 3 * best(json.loads)


def test_a_problem_names_the_field_for_openai_s_clients() -> None:
    with pytest.raises(Problem) as refused:
        parse_object(b'{"logit_bias": {"5": 1e999}}')
    assert refused.value.fields["param"] == "logit_bias.5"
