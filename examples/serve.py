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
    app, turn, waiting, answers = FastAPI(), asyncio.Lock(), dict[int, np.ndarray](), dict[int, Any]()

    @app.post("/predict")
    async def predict(inputs: list[Any]) -> Any:  # one input, as nested lists
        values = np.array(inputs, dtype=object)  # checked here, so that a bad request fails alone
        if values.shape != shape or not all(isinstance(v, int | float) and abs(v) < 1e30 for v in values.flat):
            raise HTTPException(422, f"one input is finite numbers of the shape {shape}")
        waiting[(number := id(inputs))] = values.astype(np.float32)
        async with turn:  # who comes first computes for all that wait; others join meanwhile
            if number in waiting:
                batch = {other: waiting.pop(other) for other in list({number: 0, **waiting})[:32]}
                rows, options = np.stack(list(batch.values())), {"classes": calibration.classes}
                collected = await asyncio.to_thread(collect_views, network, rows, used, **options)
                recent.extend(collected.outputs)
                table = policy.predict(collected).columns()
                answers.update((other, {k: v[row].item() for k, v in table.items()}) for row, other in enumerate(batch))
        return answers.pop(number)

    @app.get("/drift")
    def drift() -> Any:  # of the last thousand inputs
        live = ViewPredictions(np.stack(recent), names=[view.name for view in used], classes=calibration.classes)
        return diagnose(policy, calibration, incoming=live).drift._asdict()

    return app
