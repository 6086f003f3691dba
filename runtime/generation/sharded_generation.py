"""``parallel.generate`` and ``parallel.cache_bytes``: the room's entrance."""

from __future__ import annotations

from typing import Any

import torch

from runtime.execution.engine import Engine
from runtime.generation.cache_layout import bytes_of, rows_divisor
from runtime.generation.generating_part import generating_part
from runtime.generation.generation_session import GenerationSession
from runtime.generation.hugging_face_loop import SLOTS, GeneratingModel, check_generates
from runtime.generation.phase_models import cache_tensors


def generated(engine: Engine, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What ``generate`` of the original returns, on all ranks, which all must call this.

    Raises:
        ValueError: as ``ParallelModule.generate``.
    """
    check_generates(engine.model)
    engine.state.check()
    with torch.inference_mode(False):  # in which nothing is traced; programs outlive it
        return _generated(engine, _session_of(engine), args, kwargs)


def _generated(engine: Engine, session: GenerationSession, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    session.is_broken = False
    if not session.is_first:
        return session.follow()
    try:
        result = _generating_model(engine, session).generate(*args, **kwargs)
        session.end(result)
    except Exception as error:
        session.fail(error)
        raise
    return result


def cache_bytes(engine: Engine, batch: int | None, length: int | None, source_length: int | None) -> int:
    """See ``ParallelModule.cache_bytes``."""
    if batch is None and length is None:
        return _session_of(engine).num_cache_bytes
    plan, model = engine.plan, generating_part(engine.model)
    config: Any = model.config
    if plan is None or batch is None or length is None:
        raise ValueError("cache_bytes takes batch and length of a model with a plan, or neither")
    check_generates(engine.model)
    rows = -(-batch // rows_divisor(plan)) * rows_divisor(plan)
    one_token = torch.zeros(rows, 1, dtype=torch.long, device="meta")
    tensors = {"input_ids": one_token}
    if config.is_encoder_decoder:
        tensors = {**_source(engine, rows, source_length), "decoder_input_ids": one_token}
    described = cache_tensors(engine.model, tensors, {}, length=-(-length // SLOTS) * SLOTS)
    here = [tensor for tensor in described if _is_here(engine, tensor.owner)]
    return bytes_of(here, plan)


def _source(engine: Engine, rows: int, length: int | None) -> dict[str, torch.Tensor]:
    """An input of the encoder, without values: ``length`` tokens, or frames (say) as many as in the example."""
    name = str(generating_part(engine.model).main_input_name)
    if name == "input_ids" and length is not None:
        return {name: torch.zeros(rows, length, dtype=torch.long, device="meta")}
    example = None if engine.example is None else engine.example.tensors.get((name,))
    if name == "input_ids" or length is not None or example is None:
        raise ValueError(
            f"the cache of {type(engine.model).__name__} depends on its encoder's input: pass source_length (tokens of "
            "text; other inputs are taken to be as long as in example_inputs), or generate once and ask cache_bytes()"
        )
    return {name: torch.zeros(rows, *example.shape[1:], dtype=example.dtype, device="meta")}


def _is_here(engine: Engine, owner: str) -> bool:
    """Whether this rank's stage has the weights of a module."""
    stages = {
        stage for name, info in engine.state.infos.items() if name.startswith(f"{owner}.") for stage in info.stages
    }
    return engine.places.stage is None or engine.places.stage in stages


def _generating_model(engine: Engine, session: GenerationSession) -> GeneratingModel:
    """That of the session, made again where the original's attributes have changed."""
    engine.watch.update()
    if session.generating is None or session.generating[0] != engine.watch.key:
        session.generating = engine.watch.key, GeneratingModel(engine, session)
    return session.generating[1]  # type: ignore[no-any-return]


def _session_of(engine: Engine) -> GenerationSession:
    if engine.generation is None:
        engine.generation = GenerationSession(engine)
    return engine.generation  # type: ignore[no-any-return]
