"""The default engine: transformers models over paged K and V."""

from torpor.actors.engine.errors import ModelRefused, RanksDisagree, StepLoopDied
from torpor.actors.engine.factory import make_engine
from torpor.actors.engine.protocol import Engine, EventSink, InvalidPrompt

__all__ = [
    "Engine",
    "EventSink",
    "InvalidPrompt",
    "ModelRefused",
    "RanksDisagree",
    "StepLoopDied",
    "make_engine",
]
