"""What real clients send in one round of their work, in their order, with what they need to be answered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

BOTH = ("kv_cache", "weights")


@dataclass(frozen=True)
class Step:
    """One call. parked, gate: of the model afterwards; gate None = open. busy: requests that run when it comes.

    reads_json: the client reads the answer as JSON, whatever is in it.
    """

    method: str
    path: str
    query: Mapping[str, Any] = field(default_factory=dict)
    json: Mapping[str, Any] | None = None
    status: int = 200
    body: Mapping[str, Any] = field(default_factory=dict)
    parked: Sequence[str] = ()
    gate: str | None = None
    busy: int = 0
    reads_json: bool = False


def post(path: str, **fields: Any) -> Step:
    return Step("POST", path, **fields)


def get(path: str, **fields: Any) -> Step:
    return Step("GET", path, **fields)


def asleep(*parked: str) -> dict[str, Any]:
    return {"parked": parked, "gate": "asleep"}


VERL_SGLANG = (
    get("/health_generate"),
    # One field more than any version of the server knows.
    post(
        "/release_memory_occupation",
        json={"tags": ["kv_cache", "weights"], "request_id": "r1"},
        reads_json=True,
        **asleep(*BOTH),
    ),
    post("/resume_memory_occupation", json={"tags": ["weights"]}, reads_json=True, **asleep("kv_cache")),
    post(
        "/update_weights_from_disk", json={"model_path": "/w"}, body={"success": True}, **asleep("kv_cache")
    ),
    post("/resume_memory_occupation", json={"tags": ["kv_cache"]}, reads_json=True),
    get("/health_generate"),
)

PAUSED = {"gate": "paused"}

SLIME = (
    get("/health_generate"),
    # It asks until the answer is 200.
    get("/flush_cache", status=400, busy=1),
    get("/flush_cache"),
    post("/release_memory_occupation", json={}, reads_json=True, **asleep(*BOTH)),
    get("/health_generate", status=503, **asleep(*BOTH)),
    post("/resume_memory_occupation", json={"tags": ["weights"]}, reads_json=True, **asleep("kv_cache")),
    post("/pause_generation", json={}, **asleep("kv_cache")),
    get("/flush_cache", **asleep("kv_cache")),
    post("/update_weights_from_disk", json={"model_path": "/w"}, **asleep("kv_cache")),
    post("/continue_generation", json={}, **asleep("kv_cache")),
    post("/resume_memory_occupation", json={"tags": ["kv_cache", "cuda_graph"]}, reads_json=True),
    post("/release_memory_occupation", json={}, reads_json=True, **asleep(*BOTH)),
    post("/resume_memory_occupation", json={"tags": None}, reads_json=True),
)

NEMO_RL = (
    post("/flush_cache"),
    post("/release_memory_occupation", json={"tags": ["weights"]}, **asleep("weights")),
    post("/flush_cache", **asleep("weights")),
    post("/release_memory_occupation", json={"tags": ["kv_cache", "cuda_graph"]}, **asleep(*BOTH)),
    post("/resume_memory_occupation", json={"tags": ["weights"]}, **asleep("kv_cache")),
    post("/resume_memory_occupation", json={"tags": ["kv_cache", "cuda_graph"]}),
    # And over vLLM.
    post("/reset_prefix_cache"),
    post("/sleep", query={"level": 1}, **asleep(*BOTH)),
    post("/wake_up", query={"tags": "weights"}, **asleep("kv_cache")),
    post("/wake_up", query={"tags": "kv_cache"}),
)

AREAL = (
    post("/pause_generation", json={}, reads_json=True, body={"status": "ok"}, **PAUSED),
    post(
        "/update_weights_from_disk",
        json={"model_path": "/w", "abort_all_requests": True, "weight_version": "3"},
        body={"success": True},
        **PAUSED,
    ),
    post("/continue_generation", json={}, reads_json=True, body={"status": "ok"}),
    post("/pause", query={"mode": "keep", "clear_cache": "false"}, body={"status": "paused"}, **PAUSED),
    get("/is_paused", body={"is_paused": True}, **PAUSED),
    get("/is_sleeping", body={"is_sleeping": True}, **PAUSED),
    post("/resume", body={"status": "resumed"}),
    get("/is_paused", body={"is_paused": False}),
)

TRL = (
    # Its paths end in a slash, and it reads no redirect's body.
    get("/health/"),
    post("/sleep", query={"level": 2}, **asleep(*BOTH)),
    post("/wake_up", query={"tags": ["weights"]}, **asleep("kv_cache")),
    post("/models/chat/update_weights", json={"path": "/w", "on_conflict": "wait"}, **asleep("kv_cache")),
    post("/reset_prefix_cache/", **asleep("kv_cache")),
    post("/wake_up", query={"tags": ["kv_cache"]}),
)

RAY_SERVE = (
    post("/sleep", json={"model": "chat", "options": {"level": 1}}, **asleep(*BOTH)),
    get("/is_sleeping", query={"model": "chat"}, body={"is_sleeping": True}, **asleep(*BOTH)),
    post("/wakeup", json={"model": "chat", "options": {"tags": ["weights"]}}, **asleep("kv_cache")),
    post("/wakeup", json={"model": "chat"}),
    get("/is_sleeping", query={"model": "chat"}, body={"is_sleeping": False}),
    post("/pause", json={"model": "chat", "options": {"mode": "keep", "clear_cache": False}}, **PAUSED),
    get("/is_paused", query={"model": "chat"}, body={"is_paused": True}, **PAUSED),
    post("/resume", json={"model": "chat", "options": {}}),
    post("/reset_prefix_cache", json={"model": "chat"}),
    post("/sleep", json={"model": "chat", "options": {"level": 0}}, **PAUSED),
    post("/wakeup", json={"model": "chat", "options": {}}),
)

VERL_VLLM = (
    post("/sleep", query={"level": 2}, **asleep(*BOTH)),
    post("/wake_up", query={"tags": ["weights"]}, parked=("kv_cache",), gate="asleep"),
    post("/models/chat/update_weights", json={"path": "/w", "on_conflict": "wait"}, **asleep("kv_cache")),
    post("/wake_up", query={"tags": ["kv_cache"]}),
    get("/is_sleeping", body={"is_sleeping": False}),
)

OPENRLHF = (
    post("/sleep", query={"level": "1"}, **asleep(*BOTH)),
    get("/is_sleeping", body={"is_sleeping": True}, **asleep(*BOTH)),
    post("/wake_up"),
)

KVCACHED = (
    # The level is a word in JSON.
    post("/sleep", json={"level": "1"}, **asleep(*BOTH)),
    get("/is_sleeping", body={"is_sleeping": True}, **asleep(*BOTH)),
    post("/wake_up"),
    get("/is_sleeping", body={"is_sleeping": False}),
    post("/release_memory_occupation", **asleep(*BOTH)),
    post("/resume_memory_occupation"),
)

PRODUCTION_STACK = (
    post("/sleep", query={"id": "chat"}, **asleep(*BOTH)),
    get("/is_sleeping", query={"id": "chat"}, body={"is_sleeping": True}, **asleep(*BOTH)),
    post("/wake_up", query={"id": "chat"}),
    get("/is_sleeping", query={"id": "chat"}, body={"is_sleeping": False}),
)

TENSORRT_LLM = (
    post("/release_memory", json={"tags": ["kv_cache", "model_weights"]}, reads_json=True, **asleep(*BOTH)),
    get("/memory_status", body={"parked_tags": ["kv_cache", "weights"]}, **asleep(*BOTH)),
    post("/resume_memory", json={"tags": ["model", "draft_model"]}, reads_json=True, **asleep("kv_cache")),
    post("/resume_memory", json={"tags": ["kv_cache", "executor_extra"]}, reads_json=True),
    get("/memory_status", body={"parked_tags": [], "state": "awake"}),
)

CLIENTS: Mapping[str, tuple[Step, ...]] = {
    "verl on SGLang": VERL_SGLANG,
    "verl on vLLM": VERL_VLLM,
    "OpenRLHF": OPENRLHF,
    "slime": SLIME,
    "NeMo-RL": NEMO_RL,
    "AReaL": AREAL,
    "TRL": TRL,
    "Ray Serve LLM": RAY_SERVE,
    "kvcached's controller": KVCACHED,
    "production-stack": PRODUCTION_STACK,
    "TensorRT-LLM": TENSORRT_LLM,
}
