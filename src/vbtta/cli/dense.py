"""The commands on folders of images: views and labels at positions of maps, and predicted maps."""

__all__ = ["predict_maps", "write_views"]

from pathlib import Path
from typing import Any

import numpy as np

from vbtta._support.checks import require
from vbtta.cli.running import Talk, UsageError
from vbtta.data import images
from vbtta.data.labels import Array
from vbtta.integrations import collect_items
from vbtta.module import TTAModule
from vbtta.policy import Policy


def write_views(
    network: Any, folder: Path, masks: list[Path], views: Any, out: Path, labels_file: Path, talk: Talk, **options: Any
) -> None:
    """Write predictions and labels at positions of the images that have masks; one folder of masks a rater."""
    inputs, raters = _files(folder), [(path.name, _files(path)) for path in masks]
    given = {name: [(rater, files[name]) for rater, files in raters if name in files] for name in inputs}
    names = [name for name, found in given.items() if found]
    if not names:
        raise UsageError(f"no image of {folder} has a mask of its name in {', '.join(map(str, masks))}")
    if len(names) < len(inputs):
        talk.note(f"{len(inputs) - len(names):,} images without a mask are left out")

    def load(i: int) -> tuple[Array, Array]:
        drawn = [images.read_mask(path) for _, path in given[names[i]]]
        if len({mask.shape for mask in drawn}) > 1:
            raise ValueError(f"masks of {names[i]} have different sizes: {[mask.shape for mask in drawn]}")
        return images.read_image(inputs[names[i]]), np.stack(drawn) if len(raters) > 1 else drawn[0]

    if len(raters) > 1:
        options["raters"] = [[rater for rater, _ in given[name]] for name in names]
    predictions, labels = collect_items(network, len(names), load, views, ids=names, **options)
    predictions.save(out)
    predictions.align(labels).save(labels_file)  # with the predictions' ids
    document = {"written": str(out), "labels": str(labels_file), "images": len(names), "positions": len(predictions)}
    text = f"wrote {len(predictions):,} positions of {len(names):,} images to {out} and their labels to {labels_file}"
    talk.result({**document, "views": list(predictions.names)}, text)


def predict_maps(
    predictor: Any, folder: Path, views: Any, policy: Policy, out: Path, talk: Talk, *, entropy: bool
) -> None:
    """Write the most probable class (the mean of a regression) at every position of all images of a folder."""
    torch = require("torch", "torch")
    inputs, module = _files(folder), TTAModule(predictor, views, policy).eval()
    if entropy and policy.task == "regression":
        raise UsageError("--entropy is for classes; leave it out for a regression")
    out.mkdir(parents=True, exist_ok=True)
    for name in talk.track(list(inputs), "images"):
        source = inputs[name]
        volume = images.suffix_of(source) if ".nii" in images.suffix_of(source) else ""
        with torch.no_grad():
            maps = module(torch.from_numpy(images.read_image(source))[None])[0].cpu().numpy()
        if maps.ndim < 3:
            raise ValueError("the network returns rows, not maps; leave out --dense")
        if policy.task == "regression":
            images.write_map(out / f"{name}{volume or '.tif'}", maps[0], source)
            continue
        classes = np.arange(len(maps)) if policy.classes is None else np.asarray(policy.classes)
        position = maps.argmax(axis=0)
        values = classes[position] if classes.dtype.kind in "iu" else position
        images.write_map(out / f"{name}{volume or '.png'}", values, source)
        if entropy:
            terms = maps * np.log(np.maximum(maps, np.finfo(maps.dtype).tiny))
            images.write_map(out / f"{name}_entropy{volume or '.tif'}", -terms.sum(axis=0), source)
    kinds = "label and entropy maps" if entropy else "maps"
    talk.result({"written": str(out), "images": list(inputs)}, f"wrote {kinds} of {len(inputs):,} images to {out}")


def _files(folder: Path) -> dict[str, Path]:
    if not folder.is_dir():
        raise UsageError(f"{folder}: no such folder; give one of images ({', '.join(images.MAP_SUFFIXES)})")
    files = images.map_files(folder)
    if not files:
        raise UsageError(f"{folder} has no images ({', '.join(images.MAP_SUFFIXES)})")
    return files
