"""`vbtta views`: a model's predictions for all inputs under all views."""

__all__ = ["views"]

from pathlib import Path
from typing import Annotated, Any

import typer

from vbtta.cli.options import Address, Backend, BackendOption, Seed, Workers
from vbtta.cli.running import Debug, Json, Quiet, Talk, UsageError, command, existing, writable


@command
def views(
    model: Annotated[str, typer.Option("--model", metavar="PACKAGE.MODULE:FACTORY", help="What makes the model.")],
    data: Annotated[
        Path, typer.Option("--data", help="Inputs: .npy or .npz (array `inputs`), .parquet (images or numbers), .csv.")
    ],
    described: Annotated[Path, typer.Option("--views", help="Views by name and parameters (.toml or .json).")],
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Where to write the predictions (.npz; a folder with --backend ray).")
    ],
    weights: Annotated[
        Path | None, typer.Option("--weights", help="Weights of a torch module (.pt), loaded without unpickling code.")
    ] = None,
    draws: Annotated[int, typer.Option("--draws", min=1, help="Draws of every stochastic view.")] = 1,
    keep_draws: Annotated[
        int, typer.Option("--keep-draws", min=0, help="Keep the single draws of so many inputs.")
    ] = 0,
    batch_size: Annotated[int, typer.Option("--batch-size", min=1, help="Inputs worked on at once.")] = 256,
    seed: Seed = 0,
    backend: BackendOption = Backend.local,
    workers: Workers = None,
    address: Address = None,
    as_json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Predict every input under every view; an interrupted run goes on at the view where it stopped.

    Images in parquet files are given to the model as numbers from 0 to 1, shape (N, 3, H, W). With --backend ray the
    inputs are parquet files (or a folder of them), and an interrupted run goes on at the part where it stopped.

    Example:

        vbtta views --model pkg.mod:make --data inputs.npy --views views.toml --out preds.npz
    """
    talk = Talk(as_json, quiet)
    if backend is Backend.ray:
        if keep_draws:
            raise UsageError("--keep-draws is for --backend local; leave one of them out")
        _on_cluster(model, data, described, out, weights, draws, batch_size, seed, workers, address, talk)
        return
    writable(out, ".npz")
    import numpy as np

    from vbtta.augment.serial import load_views
    from vbtta.cli.files import digest
    from vbtta.cli.parts import Parts, fingerprint
    from vbtta.collect import collect_views
    from vbtta.predictions import ViewPredictions

    listed = load_views(existing(described, "views (.toml or .json)"))
    inputs, ids = _inputs(existing(data, "inputs"))
    net = _model(model, weights)
    hashes = [digest(path) for path in (data, described, *([] if weights is None else [weights]))]
    parts = Parts(out, fingerprint(model, hashes, draws, keep_draws, seed))
    talk.note(f"{len(inputs):,} inputs, {len(listed)} views: {', '.join(view.name for view in listed)}")
    found: list[ViewPredictions] = []
    for view in talk.track(listed, "views"):
        kept = parts.load(view.name)
        if kept is None:
            one = collect_views(
                net, inputs, [view], draws=draws, keep_draws=keep_draws, batch_size=batch_size, seed=seed
            )
            members = {key: getattr(one, key) for key in ("mean", "variance", "classes", "draws")}
            kept = {key: value for key, value in members.items() if value is not None}
            kept["fingerprint"] = np.array(one.fingerprints.get(view.name, ""))
            parts.save(view.name, kept)
        prints = {view.name: str(kept.pop("fingerprint"))}
        found.append(ViewPredictions(**kept, names=[view.name], fingerprints=prints))
    _join(found, ids).save(out)
    parts.clear()
    n_inputs, n_outputs = found[0].mean.shape[0], found[0].mean.shape[2]
    document = {"written": str(out), "inputs": n_inputs, "outputs": n_outputs, "views": [v.name for v in listed]}
    talk.result(document, f"wrote {n_inputs:,} inputs x {len(listed)} views x {n_outputs} outputs to {out}")


def _on_cluster(
    model: str,
    data: Path,
    described: Path,
    out: Path,
    weights: Path | None,
    draws: int,
    batch_size: int,
    seed: int,
    workers: int | None,
    address: str | None,
    talk: Talk,
) -> None:
    """The same by Ray: parquet in, a folder of parquet out."""
    from functools import partial

    from vbtta.augment.serial import load_views
    from vbtta.cli.files import digest
    from vbtta.scale import collect_views

    listed = load_views(existing(described, "views (.toml or .json)"))
    if not data.exists():
        raise UsageError(f"{data}: no such file; give the path of the inputs (.parquet, or a folder of them)")
    if out.suffix in (".npz", ".parquet"):
        raise UsageError(f"{out}: --backend ray writes many files; give the name of a folder")
    where = None if weights is None else existing(weights, "weights (.pt)").resolve()
    _model(model, where)  # what is wrong with it is said here rather than by a worker
    collected = collect_views(
        partial(_model_on_worker, model, where, str(Path.cwd())),
        data,
        listed,
        out,
        draws=draws,
        batch_size=batch_size,
        seed=seed,
        progress=talk.progress,
        key=f"{model} {'' if weights is None else digest(weights)}",
        workers=workers,
        address=address,
    )
    names = [view.name for view in listed]
    document = {
        "written": str(out),
        "inputs": collected.n_instances,
        "views": names,
        "parts": collected.n_parts,
        "parts_found": collected.n_reused,
    }
    talk.result(
        document,
        f"wrote {collected.n_instances:,} inputs x {len(names)} views to {out}: {collected.n_parts} parts, "
        f"{collected.n_reused} of them from an earlier run",
    )


def _model_on_worker(where: str, weights: Path | None, folder: str) -> Any:
    """The model, found as in the folder where the command was given."""
    import sys

    if folder not in sys.path:
        sys.path.insert(0, folder)
    return _model(where, weights)


def _join(found: list[Any], ids: Any) -> Any:
    """One view each, side by side; a view that does not draw has no variance."""
    import numpy as np

    from vbtta.predictions import ViewPredictions

    variance = None
    if any(one.variance is not None for one in found):
        parts = [np.zeros_like(one.mean) if one.variance is None else one.variance for one in found]
        variance = np.concatenate(parts, axis=1)
    return ViewPredictions(
        np.concatenate([one.mean for one in found], axis=1),
        variance,
        names=[one.names[0] for one in found],
        ids=ids,
        classes=found[0].classes,
        draws=None if found[0].draws is None else np.concatenate([one.draws for one in found], axis=1),
        fingerprints={name: text for one in found for name, text in one.fingerprints.items()},
    )


def _inputs(path: Path) -> tuple[Any, Any]:
    """Inputs (N, ...) and, from tables with a column `instance`, their ids."""
    import numpy as np

    if path.suffix in (".npy", ".npz"):
        try:
            loaded = np.load(path, allow_pickle=False)
            if path.suffix == ".npy":
                return loaded, None
            return loaded["inputs"], (loaded["ids"] if "ids" in loaded.files else None)
        except (ValueError, KeyError, OSError) as error:
            raise ValueError(f"{path} holds no plain array `inputs`: {error}") from None
    if path.suffix == ".parquet" and "image" in _parquet_columns(path):
        from vbtta.datasets.images import decode_images

        cells = _column(path, "image")
        files: list[Any] = [cell.get("bytes") if isinstance(cell, dict) else cell for cell in cells]
        return decode_images(files, mode="RGB", where=str(path)).astype(np.float32) / 255, None
    from vbtta.cli.files import read_table

    table = read_table(path)
    ids = table.pop("instance", None)
    try:
        return np.stack([column.astype(np.float64) for column in table.values()], axis=1), ids
    except (TypeError, ValueError):
        raise ValueError(f"{path}: all columns but `instance` must be numbers without gaps") from None


def _parquet_columns(path: Path) -> list[str]:
    from vbtta._support.extras import require

    try:
        names: list[str] = require("pyarrow.parquet", "cli").read_schema(path).names
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is not a parquet file: {error}") from None
    return names


def _column(path: Path, name: str) -> list[Any]:
    from vbtta._support.extras import require

    found: list[Any] = require("pyarrow.parquet", "cli").read_table(path, columns=[name])[name].to_pylist()
    return found


def _model(where: str, weights: Path | None) -> Any:
    """The model that a factory of the user's makes."""
    import sys
    from importlib import import_module

    module, _, name = where.partition(":")
    if not module or not name:
        raise UsageError(f"--model {where}: give a module and a function that makes the model, as package.module:make")
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # as `python -m` does; a console script does not
    try:
        factory = getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise UsageError(f"--model {where}: there is no module {error.name}; run vbtta where it can be found") from None
    except AttributeError:
        raise UsageError(f"--model {where}: {module} has no {name}") from None
    model = factory()
    if weights is None:
        return model
    if not hasattr(model, "load_state_dict"):
        raise UsageError(f"--weights {weights}: {where} makes a {type(model).__name__}, which has no load_state_dict")
    from vbtta._support.extras import require

    existing(weights, "weights (.pt)")
    torch = require("torch", "torch")
    try:
        state = torch.load(weights, weights_only=True, map_location="cpu")
    except Exception:  # torch has a class of its own for each way a file can be wrong
        raise ValueError(
            f"{weights} is no file of weights: it must hold a state_dict and no other object; write it with "
            "torch.save(model.state_dict(), path)"
        ) from None
    try:
        model.load_state_dict(state)
    except Exception as error:  # likewise
        said = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise ValueError(f"{weights} holds no weights for {where}: {' '.join(said[1:2] or said[:1])[:300]}") from None
    return model
