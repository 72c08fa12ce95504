"""Reading a GGUF file through transformers without parsing it again for each of transformers' questions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import gguf
from transformers import modeling_gguf_pytorch_utils as reading


@contextmanager
def parsed_once(go_on: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Inside, a file's header is parsed once, and no progress bar is drawn. go_on: called before each tensor.

    Configuration, tokenizer and weights each parse the whole header, some 150,000 strings for a small model, and the
    table of tensor names is built anew for every module: most of the time that loading takes. transformers looks
    the reader up in `gguf` at each call, so that a remembering one can stand in for it.
    """

    def counting(tensors: Iterable[Any], **_: Any) -> Iterator[Any]:
        for tensor in tensors:
            go_on()
            yield tensor

    reader, names, bar = gguf.GGUFReader, gguf.get_tensor_name_map, reading.tqdm
    gguf.GGUFReader = cache(reader)
    gguf.get_tensor_name_map = cache(names)
    reading.tqdm = counting
    try:
        yield
    finally:
        gguf.GGUFReader, gguf.get_tensor_name_map, reading.tqdm = reader, names, bar
