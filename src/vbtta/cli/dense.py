"""The commands on folders of images: views and labels at positions of maps, predicted maps, and their pictures."""

from itertools import tee
from pathlib import Path
from typing import Any

import numpy as np

from vbtta._support.checks import require
from vbtta.augment.serial import load_views
from vbtta.cli.files import load_predictor
from vbtta.cli.running import Talk, UsageError, existing
from vbtta.conformal import load_policy, unwrapped
from vbtta.data import images
from vbtta.data.labels import Array
from vbtta.integrations import collect_items
from vbtta.module import TTAModule
from vbtta.report.maps import MapExample, map_examples


def write_views(
    network: Any, folder: Path, masks: list[Path], views: Any, out: Path, labels_file: Path, talk: Talk, **options: Any
) -> None:
    """Write predictions and labels at positions of the images that have masks; one folder of masks a rater."""
    images_of, raters = _labelled(folder, masks, talk)
    names, several = list(images_of), len(masks) > 1

    def load(i: int) -> tuple[Array, Array]:
        image, drawn = _read(images_of[names[i]])
        return image, drawn if several else drawn[0]

    if several:
        options["raters"] = [raters[name] for name in names]
    predictions, labels = collect_items(network, len(names), load, views, ids=names, **options)
    predictions.save(out)
    predictions.align(labels).save(labels_file)  # with the predictions' ids
    document = {"written": str(out), "labels": str(labels_file), "images": len(names), "positions": len(predictions)}
    text = f"wrote {len(predictions):,} positions of {len(names):,} images to {out} and their labels to {labels_file}"
    talk.result({**document, "views": list(predictions.names)}, text)


def load_module(predictor: str, weights: Path | None, described: Path, policy: Path) -> TTAModule:
    """The network of a factory with the views and the policy of files."""
    views = load_views(existing(described, "views (.toml or .json)"))
    rule = load_policy(existing(policy, "a policy (.json)"))
    return TTAModule(load_predictor(predictor, weights), views, unwrapped(rule)[0]).eval()


def map_pictures(module: TTAModule, folder: Path, masks: list[Path], talk: Talk) -> list[MapExample]:
    """The worst and the best predicted images of a folder; the class that most raters drew counts as the truth."""
    torch, policy = require("torch", "torch"), module.policy
    if policy.task != "classification" or policy.multilabel:
        raise UsageError("--data shows maps of classes; leave it out for other tasks")
    files, _ = _labelled(folder, masks, talk)
    classes = range(policy.n_outputs) if policy.classes is None else policy.classes

    def truth(drawn: Array) -> Array:
        votes = np.stack([(drawn == value).sum(axis=0) for value in classes])  # (C, H, W)
        return np.where(votes.any(axis=0), votes.argmax(axis=0), -1)

    pairs = tee(_read(paths) for paths in talk.track(list(files.values()), "images"))
    inputs = (torch.from_numpy(image) for image, _ in pairs[0])
    return map_examples(module, inputs, (truth(drawn) for _, drawn in pairs[1]), names=list(files), ignore=-1)


def predict_maps(module: TTAModule, folder: Path, out: Path, talk: Talk, *, entropy: bool) -> None:
    """Write the most probable class (the mean of a regression) at every position of all images of a folder."""
    torch, policy, inputs = require("torch", "torch"), module.policy, _files(folder)
    if entropy and policy.task == "regression":
        raise UsageError("--entropy is for classes; leave it out for a regression")
    if out.resolve() == folder.resolve():
        raise UsageError(f"--out {out}: the images are in this folder and would be overwritten; give another one")
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


def _labelled(folder: Path, masks: list[Path], talk: Talk) -> tuple[dict[str, list[Path]], dict[str, list[str]]]:
    """By the names of the images that have masks: paths of image and masks, and the raters who drew them."""
    inputs, raters = _files(folder), {path.name: _files(path) for path in masks}
    if len(raters) < len(masks):
        raise UsageError(f"--masks: the folders' names are the raters', and must differ; {', '.join(map(str, masks))}")
    drawn = {name: [rater for rater, files in raters.items() if name in files] for name in inputs}
    drawn = {name: people for name, people in drawn.items() if people}
    if not drawn:
        raise UsageError(f"no image of {folder} has a mask of its name in {', '.join(map(str, masks))}")
    if len(drawn) < len(inputs):
        talk.note(f"{len(inputs) - len(drawn):,} images without a mask are left out")
    return {name: [inputs[name], *(raters[rater][name] for rater in people)] for name, people in drawn.items()}, drawn


def _read(paths: list[Path]) -> tuple[Array, Array]:
    """An image and its masks (R, H, W)."""
    image, *masks = paths
    drawn = [images.read_mask(path) for path in masks]
    if len({mask.shape for mask in drawn}) > 1:
        raise ValueError(f"masks of {image.name} have different sizes: {[mask.shape for mask in drawn]}")
    return images.read_image(image), np.stack(drawn)


def _files(folder: Path) -> dict[str, Path]:
    files = images.map_files(folder) if folder.is_dir() else {}
    if not files:
        raise UsageError(f"{folder}: no such folder of images ({', '.join(images.MAP_SUFFIXES)}); give another one")
    return files
