"""A policy behind FastAPI: requests share batches, and live inputs are compared with those of calibration time."""

import asyncio
from collections import deque
from typing import Any

import numpy as np
from fastapi import FastAPI, HTTPException

from vbtta import ViewPredictions, collect_views, diagnose


def make_app(network: Any, views: Any, policy: Any, calibration: ViewPredictions, *, shape: tuple[int, ...]) -> FastAPI:
    """App of a network (a module, `TTAModule.network`, the path of an ONNX file), its views and its policy."""
    used, recent = [view for view in views if view.name in policy.used_names], deque[Any](maxlen=1000)
    app, turn, waiting = FastAPI(), asyncio.Lock(), list[tuple[np.ndarray, dict[str, Any]]]()

    async def compute() -> None:  # who comes first computes for all that wait; others join meanwhile
        async with turn:
            batch, waiting[:] = waiting[:32], waiting[32:]
            if batch:
                rows, options = np.stack([values for values, _ in batch]), {"classes": calibration.classes}
                collected = await asyncio.to_thread(collect_views, network, rows, used, **options)
                recent.extend(collected.outputs)
                table = policy.predict(collected).columns()
                for row, (_, answer) in enumerate(batch):
                    answer.update({name: column[row].item() for name, column in table.items()})

    @app.post("/predict")
    async def predict(inputs: list[Any]) -> Any:  # one input, as nested lists
        values, answer = np.array(inputs, dtype=object), dict[str, Any]()  # checked here: a bad request fails alone
        if values.shape != shape or not all(isinstance(v, int | float) and abs(v) < 1e30 for v in values.flat):
            raise HTTPException(422, f"one input is finite numbers of the shape {shape}")
        waiting.append((values.astype(np.float32), answer))
        await asyncio.shield(compute())  # a request that is cancelled still computes for the others
        if not answer:
            raise HTTPException(503, "the batch of this request failed: ask again")
        return answer

    @app.get("/drift")
    async def drift() -> Any:  # of the last thousand inputs
        if not recent:
            raise HTTPException(409, "there are no inputs yet: ask after a request to /predict")
        live = ViewPredictions(np.stack(recent), names=[view.name for view in used], classes=calibration.classes)
        return (await asyncio.to_thread(diagnose, policy, calibration, incoming=live)).drift._asdict()

    return app
