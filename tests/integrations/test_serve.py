"""The example of serving, driven through HTTP."""

import asyncio
import importlib.util
import threading
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from fastapi import HTTPException
from fastapi.testclient import TestClient
from torch import nn

from vbtta import TTAModule, collect_views, fit_policy
from vbtta.augment import Blur, HorizontalFlip, Identity, VerticalFlip

spec = importlib.util.spec_from_file_location("serve", Path(__file__).parents[2] / "examples" / "serve.py")
serve = importlib.util.module_from_spec(spec)
spec.loader.exec_module(serve)
SHAPE = (1, 12, 12)


@pytest.fixture(scope="module")
def parts():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(3), nn.Flatten(), nn.Linear(72, 3))
    views, images = [Identity(), HorizontalFlip(), VerticalFlip(), Blur(0.7)], torch.randn(200, *SHAPE)
    calibration = collect_views(network.eval(), images, views, classes=["ant", "bee", "cat"])
    truth = calibration.classes[calibration.outputs[:, :3].mean(axis=1).argmax(axis=1)]  # type: ignore[index]
    policy = fit_policy(calibration, truth, task="classification", guard=False)
    return network, views, policy, calibration


def exported(network, folder):
    program = torch.export.export(
        network, (torch.zeros(2, *SHAPE),), dynamic_shapes=({0: torch.export.Dim("rows", min=1)},)
    )
    torch.onnx.export(program, (), folder / "network.onnx", verbose=False)
    return folder / "network.onnx"


@pytest.mark.parametrize("kind", ["TTAModule", "ONNX"])
def test_answers_are_those_of_the_policy(parts, kind, tmp_path):
    network, views, policy, calibration = parts
    predictor = exported(network, tmp_path) if kind == "ONNX" else TTAModule(network, views, policy).network
    client = TestClient(serve.make_app(predictor, views, policy, calibration, shape=SHAPE))
    images = torch.randn(4, *SHAPE)
    expected = policy.predict(collect_views(network, images, views, classes=calibration.classes)).columns()
    for row, image in enumerate(images):
        answer = client.post("/predict", json=image.tolist()).json()
        assert answer["label"] == expected["label"][row]
        assert answer["proba_bee"] == pytest.approx(expected["proba_bee"][row], abs=1e-5)
    message = "one input is finite numbers of the shape (1, 12, 12)"
    texts, infinite = np.full(SHAPE, "a").tolist(), torch.zeros(SHAPE).tolist()
    infinite[0][0][0] = 1e39  # beyond single precision
    for bad in ([[1.0, 2.0]], [[1.0], [2.0, 3.0]], texts, infinite):
        wrong = client.post("/predict", json=bad)
        assert (wrong.status_code, wrong.json()["detail"]) == (422, message)


def test_drift_of_live_inputs(parts):
    network, views, policy, calibration = parts
    for shift, drifted in ((0.0, False), (3.0, True)):
        client = TestClient(serve.make_app(network, views, policy, calibration, shape=SHAPE))
        for image in torch.randn(100, *SHAPE, generator=torch.Generator().manual_seed(1)) + shift:
            client.post("/predict", json=image.tolist())
        report = client.get("/drift").json()
        assert report["drifted"] is drifted
        assert (report["n_reference"], report["n_incoming"]) == (200, 100)


def test_requests_that_come_meanwhile_share_a_batch(parts):
    network, views, policy, calibration = parts
    sizes, begun, go = [], threading.Event(), threading.Event()

    def slow(batch):
        begun.set()
        assert go.wait(60)
        sizes.append(len(batch))
        with torch.no_grad():
            return network(torch.as_tensor(batch)).numpy()

    app = serve.make_app(slow, views, policy, calibration, shape=SHAPE)
    images = np.random.default_rng(0).normal(size=(8, *SHAPE)).astype(np.float32)

    async def ask():
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            first = asyncio.create_task(client.post("/predict", json=images[0].tolist()))
            assert await asyncio.to_thread(begun.wait, 60)
            others = [asyncio.create_task(client.post("/predict", json=image.tolist())) for image in images[1:]]
            while not all_waiting(app, 7):
                await asyncio.sleep(0)
            go.set()
            return await asyncio.gather(first, *others)

    answers = [response.json()["proba_ant"] for response in asyncio.run(ask())]
    expected = policy.predict(collect_views(network, images, views)).proba[:, 0]
    np.testing.assert_allclose(answers, expected, atol=1e-5)
    assert set(sizes) == {1, 7}


def test_a_batch_that_fails_or_a_request_that_is_cancelled_leaves_the_others_alone(parts):
    network, views, policy, calibration = parts
    begun, go, calls = threading.Event(), threading.Event(), []

    def failing(batch):
        calls.append(len(batch))
        begun.set()
        assert go.wait(60)
        if len(batch) == 3:
            raise RuntimeError("out of memory")
        with torch.no_grad():
            return network(torch.as_tensor(batch)).numpy()

    app = serve.make_app(failing, views, policy, calibration, shape=SHAPE)
    predict, drift = (next(r.endpoint for r in app.routes if r.path == path) for path in ("/predict", "/drift"))
    images = np.random.default_rng(0).normal(size=(4, *SHAPE)).astype(np.float32)

    async def ask():
        with pytest.raises(HTTPException, match="no inputs yet"):
            await drift()
        first = asyncio.create_task(predict(images[0].tolist()))
        assert await asyncio.to_thread(begun.wait, 60)
        others = [asyncio.create_task(predict(image.tolist())) for image in images[1:]]
        while not all_waiting(app, 3):
            await asyncio.sleep(0)
        first.cancel()
        others[1].cancel()
        go.set()
        results = await asyncio.gather(first, *others, return_exceptions=True)
        assert all_waiting(app, 0)
        return results, await predict(images[0].tolist())

    (first, second, third, fourth), later = asyncio.run(ask())
    assert isinstance(first, asyncio.CancelledError)
    assert isinstance(third, asyncio.CancelledError)
    assert isinstance(second, RuntimeError)
    assert isinstance(fourth, HTTPException)
    assert fourth.status_code == 503
    assert later["proba_ant"] == pytest.approx(
        policy.predict(collect_views(network, images, views)).proba[0, 0], abs=1e-5
    )


def all_waiting(app, count):
    [route] = [route for route in app.routes if route.path == "/predict"]
    return len(route.endpoint.__closure__[route.endpoint.__code__.co_freevars.index("waiting")].cell_contents) == count
