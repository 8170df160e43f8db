"""`vbtta views`: a predictor's outputs for all inputs under all views."""

__all__ = ["views"]

from pathlib import Path
from typing import Annotated, Any

from typer import Option

from vbtta.cli import running
from vbtta.cli.running import UsageError


@running.command
def views(
    predictor: Annotated[str, Option(metavar="PACKAGE.MODULE:FACTORY", help="Function that makes the predictor.")],
    data: Annotated[Path, Option(help="Inputs: .npy or .npz (array `inputs`), .parquet (images or numbers), .csv.")],
    described: Annotated[Path, Option("--views", help="Views by name and parameters (.toml or .json).")],
    out: Annotated[
        Path, Option("--out", "-o", help="Where to write the predictions (.npz; a folder with --backend ray).")
    ],
    weights: Annotated[
        Path | None, Option(help="Weights of a torch module (.pt), loaded without unpickling code.")
    ] = None,
    draws: Annotated[int, Option(min=1, help="Draws of every stochastic view.")] = 1,
    keep_draws: Annotated[int, Option(min=0, help="Keep the single draws of so many inputs.")] = 0,
    batch_size: Annotated[int, Option(min=1, help="Inputs worked on at once.")] = 256,
    seed: running.Seed = 0,
    backend: running.BackendOption = running.Backend.local,
    key: Annotated[
        str | None, Option(help="With --backend ray: a name for the network and its weights, for resuming.")
    ] = None,
    workers: running.Workers = None,
    address: running.Address = None,
    as_json: running.Json = False,
    quiet: running.Quiet = False,
    debug: running.Debug = False,
) -> None:
    """Predict every input under every view; an interrupted run goes on at the view where it stopped.

    Images in parquet files are given to the predictor as numbers from 0 to 1, shape (N, 3, H, W). With --backend ray
    the inputs are parquet files (or a folder of them), and an interrupted run goes on at the part where it stopped.

    Example:

        vbtta views --predictor pkg.mod:make --data inputs.npy --views views.toml --out preds.npz
    """
    talk = running.Talk(as_json, quiet)
    from vbtta.augment.serial import load_views
    from vbtta.cli.files import digest

    options: dict[str, Any] = {"draws": draws, "batch_size": batch_size, "seed": seed}
    if backend is running.Backend.ray:
        if keep_draws:
            raise UsageError("--keep-draws is for --backend local; leave one of them out")
        if not key:
            raise running.UsageError(
                "--backend ray needs --key, a name for the network and the version of its weights, such as "
                "--key 'resnet50 of May': a later run under the same key uses the parts that are finished"
            )
        listed = load_views(running.existing(described, "views (.toml or .json)"))
        options |= {"workers": workers, "address": address, "progress": talk.progress}
        content = "" if weights is None else digest(running.existing(weights, "weights (.pt)"))
        options["key"] = f"{key} {predictor} {content}"
        return _on_cluster(predictor, weights, data, listed, out, talk, options)
    running.writable(out, ".npz")
    import numpy as np

    from vbtta.cli.parts import Parts, fingerprint
    from vbtta.collect import collect_views
    from vbtta.data.predictions import ViewPredictions

    listed = load_views(running.existing(described, "views (.toml or .json)"))
    inputs, ids = _inputs(running.existing(data, "inputs"))
    function = _load(predictor, weights)
    hashes = [digest(path) for path in (data, described, *([] if weights is None else [weights]))]
    parts = Parts(out, fingerprint(predictor, hashes, draws, keep_draws, seed))
    names = [view.name for view in listed]
    talk.note(f"{len(inputs):,} inputs, {len(listed)} views: {', '.join(names)}")
    collected: list[ViewPredictions] = []
    for view in talk.track(listed, "views"):
        members = parts.load(view.name)
        if members is None:
            single = collect_views(function, inputs, [view], keep_draws=keep_draws, **options)
            arrays = {key: getattr(single, key) for key in ("outputs", "variance", "classes", "draws")}
            members = {key: value for key, value in arrays.items() if value is not None}
            members["fingerprint"] = np.array(single.fingerprints.get(view.name, ""))
            parts.save(view.name, members)
        prints = {view.name: str(members.pop("fingerprint"))}
        collected.append(ViewPredictions(**members, names=[view.name], fingerprints=prints))
    _join(collected, ids).save(out)
    parts.clear()
    n_inputs, _, n_outputs = collected[0].outputs.shape
    document = {"written": str(out), "inputs": n_inputs, "outputs": n_outputs, "views": names}
    talk.result(document, f"wrote {n_inputs:,} inputs x {len(names)} views x {n_outputs} outputs to {out}")
    return None


def _on_cluster(
    predictor: str,
    weights: Path | None,
    data: Path,
    listed: Any,
    out: Path,
    talk: running.Talk,
    options: dict[str, Any],
) -> None:
    """The same by Ray: parquet in, a folder of parquet out."""
    from functools import partial

    from vbtta.ray import collect_views

    if not data.exists():
        raise UsageError(f"{data}: no such file; give the path of the inputs (.parquet, or a folder of them)")
    if out.suffix in (".npz", ".parquet"):
        raise UsageError(f"{out}: --backend ray writes many files; give the name of a folder")
    weights = None if weights is None else weights.resolve()
    _load(predictor, weights)  # raise errors here rather than on a worker
    factory = partial(_load, predictor, weights, str(Path.cwd()))
    collected = collect_views(factory, data, listed, out, **options)
    names = [view.name for view in listed]
    counts = {"parts": collected.n_parts, "parts_found": collected.n_reused}
    talk.result(
        {"written": str(out), "inputs": collected.n_instances, "views": names, **counts},
        f"wrote {collected.n_instances:,} inputs x {len(names)} views to {out}: {collected.n_parts} parts, "
        f"{collected.n_reused} of them from an earlier run",
    )


def _join(collected: list[Any], ids: Any) -> Any:
    """Single views side by side; a view that does not draw has no variance."""
    import numpy as np

    from vbtta.data.predictions import ViewPredictions

    variance = draws = None
    if any(single.variance is not None for single in collected):
        variance = [
            np.zeros_like(single.outputs) if single.variance is None else single.variance for single in collected
        ]
    if collected[0].draws is not None:
        draws = np.concatenate([single.draws for single in collected], axis=1)
    return ViewPredictions(
        np.concatenate([single.outputs for single in collected], axis=1),
        None if variance is None else np.concatenate(variance, axis=1),
        names=[single.names[0] for single in collected],
        ids=ids,
        classes=collected[0].classes,
        draws=draws,
        fingerprints={name: text for single in collected for name, text in single.fingerprints.items()},
    )


def _inputs(path: Path) -> tuple[Any, Any]:
    """Inputs (N, ...) and, from tables with a column `instance`, their ids."""
    import numpy as np

    from vbtta._support.checks import require
    from vbtta.cli.files import read_table

    if path.suffix in (".npy", ".npz"):
        try:
            loaded = np.load(path, allow_pickle=False)
            if path.suffix == ".npy":
                return loaded, None
            return loaded["inputs"], (loaded["ids"] if "ids" in loaded.files else None)
        except (ValueError, KeyError, OSError) as error:
            raise ValueError(f"{path} holds no plain array `inputs`: {error}") from None
    if path.suffix == ".parquet":
        parquet = require("pyarrow.parquet", "cli")
        try:
            images = "image" in parquet.read_schema(path).names
        except (OSError, ValueError) as error:
            raise ValueError(f"{path} is not a parquet file: {error}") from None
        if images:
            from vbtta.data.files import decode_images

            cells = parquet.read_table(path, columns=["image"])["image"].to_pylist()
            files: list[Any] = [cell.get("bytes") if isinstance(cell, dict) else cell for cell in cells]
            return decode_images(files, mode="RGB", where=str(path)).astype(np.float32) / 255, None
    table = read_table(path)
    ids = table.pop("instance", None)
    try:
        return np.stack([column.astype(np.float64) for column in table.values()], axis=1), ids
    except (TypeError, ValueError):
        raise ValueError(f"{path}: all columns but `instance` must be numbers without gaps") from None


def _load(where: str, weights: Path | None, folder: str | None = None) -> Any:
    """The predictor that a factory of the user makes, with modules found as from the folder, by default this one."""
    import sys
    from importlib import import_module

    module, _, name = where.partition(":")
    if not module or not name:
        raise UsageError(
            f"--predictor {where}: give a module and a function that makes the predictor, as package.module:make"
        )
    folder = folder or str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)  # as `python -m` does; a console script does not
    try:
        factory = getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise UsageError(
            f"--predictor {where}: there is no module {error.name}; run vbtta where it can be found"
        ) from None
    except AttributeError:
        raise UsageError(f"--predictor {where}: {module} has no {name}") from None
    network = factory()
    if weights is None:
        return network
    if not hasattr(network, "load_state_dict"):
        raise UsageError(f"--weights {weights}: {where} makes a {type(network).__name__}, which has no load_state_dict")
    from vbtta._support.checks import require

    running.existing(weights, "weights (.pt)")
    torch = require("torch", "torch")
    try:
        state = torch.load(weights, weights_only=True, map_location="cpu")
    except Exception:  # torch has a class of its own for each way a file can be wrong
        raise ValueError(
            f"{weights} is no file of weights: it must hold a state_dict and no other object; write it with "
            "torch.save(model.state_dict(), path)"
        ) from None
    try:
        network.load_state_dict(state)
    except Exception as error:  # likewise
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise ValueError(f"{weights} holds no weights for {where}: {' '.join(lines[1:2] or lines[:1])[:300]}") from None
    return network
