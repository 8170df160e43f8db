"""The typer application: its commands, its version and its exit codes."""

import hashlib
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from typer import Argument, Option
from typer.core import TyperGroup

import vbtta
import vbtta.collect
import vbtta.ray
from vbtta._support.files import to_plain
from vbtta.augment.serial import load_views
from vbtta.cli import files, running
from vbtta.cli.running import Out, Talk, UsageError, command, existing, nearest, needs, refuse, writable
from vbtta.comparison import closing_sentences, default_methods, entries
from vbtta.conformal import ConformalPolicy, conformalize, load_policy, unwrapped
from vbtta.data.files import write_table
from vbtta.report import documents
from vbtta.report.html import write_report

_SHOWN, _BAR = 8, 30  # views in the summary of a fit, and the width of a bar of weight 1


class _OneLineErrors(TyperGroup):
    """Wrong use is one line on the error stream and exit code 2, without a usage box around it."""

    def main(self, *args: Any, **options: Any) -> Any:
        """Run the command and end the process."""
        try:
            code = super().main(*args, **{**options, "standalone_mode": False})
        except Exception as error:
            if not hasattr(error, "format_message"):
                raise
            message = error.format_message().rstrip(".").replace("Value error, ", "")
            option, wrong, choices = message.partition(" is not one of ")
            message += nearest(option.split("'")[-2], choices.strip("'").split("', '")) if wrong else ""
            running.complain(f"{message}; see {getattr(getattr(error, 'ctx', None), 'command_path', 'vbtta')} --help")
            sys.exit(int(getattr(error, "exit_code", 2)))
        sys.exit(code if isinstance(code, int) else 0)


app = typer.Typer(
    name="vbtta",
    cls=_OneLineErrors,
    help="Weighted test-time augmentation: which views of an input deserve how much weight.",
    no_args_is_help=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _version(wanted: bool) -> None:
    if wanted:
        name, *others = (f"{package} {number}" for package, number in documents.versions().items())
        typer.echo(f"{name} ({', '.join(others)})")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, Option("--version", callback=_version, is_eager=True, help="Show the versions that matter and exit.")
    ] = False,
) -> None:
    pass


@app.command()
@command
def demo(
    talk: Talk,
    out: Annotated[Path, Out(help="Folder for the files of the run.")] = Path("vbtta-demo"),
    seed: running.Seed = 0,
) -> None:
    """Train a small network to find cells, collect views, fit to three raters, compare, diagnose and write a report.

    Example:

        vbtta demo --out runs/demo
    """
    out.mkdir(parents=True, exist_ok=True)
    from vbtta.cli.demo import run

    run(out, seed, talk)


@app.command()
@command
def views(
    talk: Talk,
    predictor: Annotated[str, running.Predictor(help="Function that makes the predictor.")],
    data: Annotated[Path, Option(help="Inputs: .npy, .npz (array `inputs`), .parquet, .csv; a folder with --dense.")],
    described: Annotated[Path, running.Described(help="Views by name and parameters (.toml or .json).")],
    out: Annotated[Path, Out(help="Where to write the predictions (.npz; a folder with --backend ray).")],
    weights: Annotated[
        Path | None, Option(help="Weights of a torch module (.pt), loaded without running code.")
    ] = None,
    draws: Annotated[int, Option(min=1, help="Draws of every stochastic view.")] = 1,
    batch_size: Annotated[int | None, Option(min=1, help="Inputs worked on at once, 256; maps: one image.")] = None,
    seed: running.Seed = 0,
    backend: running.BackendOption = running.Backend.local,
    key: Annotated[str | None, Option(help="With --backend ray: name of network and weights, for resuming.")] = None,
    workers: running.Workers = None,
    address: running.Address = None,
    dense: Annotated[bool, Option("--dense", help="Maps: --data is a folder of images (PNG, TIFF, NIfTI).")] = False,
    masks: Annotated[list[Path] | None, Option(help="With --dense: folder of masks; several: one a rater.")] = None,
    labels: Annotated[Path | None, Option(help="With --dense: where to write the labels (.csv or .parquet).")] = None,
    positions: Annotated[int | None, Option(min=1, help="With --dense: positions drawn per image, 200.")] = None,
    ignore: Annotated[int | None, Option(help="With --dense: value of the masks that is no class.")] = None,
    classes: Annotated[list[int] | None, Option(help="With --dense: values of the classes, if not 0, 1, ...")] = None,
) -> None:
    """Predict every input under every view; an interrupted run goes on at the view where it stopped.

    Views of images take arrays (N, channels, H, W). Images in parquet files get this shape, with numbers from 0 to 1.
    With --backend ray the inputs are parquet files (or a folder of them), and an interrupted run goes on at the part
    where it stopped.
    With --dense the predictor returns maps, and predictions and labels at random positions of all images are written.

    Example:

        vbtta views --predictor pkg.mod:make --data inputs.npy --views views.toml --out preds.npz
    """
    on_ray = backend is running.Backend.ray
    needs("--backend ray", on_ray, key=key, workers=workers, address=address)
    needs("--dense", dense, masks=masks, labels=labels, positions=positions, ignore=ignore, classes=classes)
    refuse(dense and (on_ray or not masks or labels is None), "--dense needs --masks, --labels and --backend local")
    refuse(on_ray and out.suffix in (".npz", ".parquet"), "--backend ray writes many files; give the name of a folder")
    refuse(on_ray and not key, "--backend ray needs --key, a name for network and weights, for resuming")
    refuse(dense and batch_size is not None, "--dense works on one image at a time; leave out --batch-size")
    batch_size = batch_size or 256
    listed = load_views(existing(described, "views (.toml or .json)"))
    names = [view.name for view in listed]
    options: dict[str, Any] = {"draws": draws, "seed": seed}
    if dense and masks and labels is not None:
        writable(out, ".npz", ".parquet")
        writable(labels, ".csv", ".parquet")
        from vbtta.cli.dense import write_views

        options |= {"positions": positions or 200, "ignore": ignore, "classes": classes, "progress": talk.progress}
        return write_views(files.load_predictor(predictor, weights), data, masks, listed, out, labels, talk, **options)
    if on_ray:
        weights = None if weights is None else existing(weights, "weights (.pt)").resolve()
        files.load_predictor(predictor, weights)  # raise errors here rather than on a worker
        options |= {"batch_size": batch_size, "workers": workers, "address": address, "progress": talk.progress}
        options["key"] = f"{key} {predictor} {'' if weights is None else files.digest(weights)}"
        factory = partial(files.load_predictor, predictor, weights, str(Path.cwd()))
        _, n_inputs, n_parts, n_reused = vbtta.ray.collect_views(factory, data, listed, out, **options)
        document = {"written": str(out), "inputs": n_inputs, "views": names, "parts": n_parts, "parts_found": n_reused}
        origin = f"{n_parts} parts, {n_reused} of them from an earlier run"
        return talk.result(document, f"wrote {n_inputs:,} inputs x {len(names)} views to {out}: {origin}")
    writable(out, ".npz")
    inputs, ids = files.read_inputs(existing(data, "inputs"))
    function = files.load_predictor(predictor, weights)
    hashes = [files.digest(path) for path in (data, described, *([] if weights is None else [weights]))]
    talk.note(f"{len(inputs):,} inputs, {len(listed)} views: {', '.join(names)}")
    folder, parts = out.with_name(f"{out.name}.parts"), []
    folder.mkdir(exist_ok=True)
    for view in talk.track(listed, "views"):
        made_of = repr((predictor, hashes, draws, seed, view.name))
        path = folder / f"{hashlib.sha256(made_of.encode()).hexdigest()[:24]}.npz"
        part = files.read_part(path)
        if part is None:
            part = vbtta.collect.collect_views(function, inputs, [view], batch_size=batch_size, **options)
            part.save(path)
        parts.append(part)
    predictions = files.side_by_side(parts, ids)
    predictions.save(out)
    shutil.rmtree(folder, ignore_errors=True)
    n_inputs, _, n_outputs = predictions.outputs.shape
    document = {"written": str(out), "inputs": n_inputs, "outputs": n_outputs, "views": names}
    return talk.result(document, f"wrote {n_inputs:,} inputs x {len(names)} views x {n_outputs} outputs to {out}")


@app.command()
@command
def fit(
    talk: Talk,
    predictions: running.PredictionsFile,
    labels: running.LabelsFile,
    task: Annotated[running.Task, Option(help="What the labels are.")],
    out: Annotated[Path, Out(help="Where to write the policy (.json).")],
    report: Annotated[Path | None, Option(help="Write a page about the policy (.html) too.")] = None,
    consensus: Annotated[Path | None, Option(help="Write the inferred true labels (.csv or .parquet) too.")] = None,
    model: Annotated[running.Model, Option(help="What is assumed; auto stacks several.")] = running.Model.auto,
    engine: Annotated[running.Engine, Option(help="How it is inferred.")] = running.Engine.auto,
    guard: Annotated[bool, Option(help="Compare with the network alone on held-out inputs.")] = True,
    hard_guard: Annotated[bool, Option("--hard-guard", help="Do without the views where they do not help.")] = False,
    budget: Annotated[int | None, Option(min=1, help="Use at most so many views, the best ones.")] = None,
    sequential: Annotated[bool, Option("--sequential", help="Views in stages; an input stops when it can.")] = False,
    tolerance: Annotated[float | None, Option(min=1e-9, help="With --sequential: largest loss, 0.005 nats.")] = None,
    sets: running.Sets = None,
    seed: running.Seed = 0,
    backend: running.BackendOption = running.Backend.local,
    workers: running.Workers = None,
    address: running.Address = None,
) -> None:
    """Infer how much weight each view deserves from predictions and labels.

    With --task multilabel the labels have a column of 0 and 1 for every output, named by its class. With --sets the
    file has sets or intervals too, by cross-conformal prediction on the same labels. --consensus writes one row an
    input: the true label that its labels and views point to, how certain it is, and how many labels there were.

    Example:

        vbtta fit preds.npz labels.csv --task classification --out policy.json --report report.html
    """
    writable(out, ".json")
    writable(report, ".html")
    writable(consensus, ".csv", ".parquet")
    on_ray = backend is running.Backend.ray
    needs("--backend ray", on_ray, workers=workers, address=address)
    needs("--sequential", sequential, tolerance=tolerance)
    advi, several_fits = engine is running.Engine.advi, budget is not None or sequential
    refuse(hard_guard and not guard, "--hard-guard needs the guard; leave out --no-guard")
    refuse(several_fits and advi, "--budget and --sequential fit many times, too often for ADVI; leave it out")
    refuse(sequential and (hard_guard or not guard), "--sequential has no guard; leave out --hard-guard and --no-guard")
    refuse(budget is not None and sequential, "--sequential orders all views by their weight; leave out --budget")
    if task is running.Task.multilabel and (on_ray or several_fits or sets):
        raise UsageError("--task multilabel goes without --backend ray, --budget, --sequential and --sets")
    if on_ray and (several_fits or sets or report or consensus or advi):
        wrong = "--budget, --sequential, --sets, --report, --consensus and --engine advi"
        raise UsageError(f"{wrong} need all data in memory; leave out --backend ray")
    options: dict[str, Any] = {"task": task.value, "model": model.value, "seed": seed}
    options["guard"] = "hard" if hard_guard else guard
    if on_ray:
        options |= {"workers": workers, "address": address}
        talk.note("fitting ...")
        remote = vbtta.ray.fit_policy(predictions, labels, **options)
        remote.save(out)
        return _show(talk, remote, out, None, None)
    views, answers = files.read_pair(predictions, labels, task.value, talk)
    talk.note("fitting ...")
    chosen = {**options, "engine": engine.value, "progress": talk.progress}
    if sequential:
        del chosen["guard"]
        policy: Any = vbtta.fit_sequential(views, answers, tolerance=tolerance or 0.005, **chosen)
    elif budget is not None:
        policy = vbtta.select_views(views, answers, budget=budget, **chosen)
    else:
        policy = vbtta.fit_policy(views, answers, **chosen)
    if sets:
        talk.note("refitting to five folds for the sets ...")
        policy = conformalize(policy, views, answers, level=sets if len(sets) > 1 else sets[0], cross=True, seed=seed)
    policy.save(out)
    if report is not None:
        hashes = {path.name: files.digest(path) for path in (predictions, labels)}
        recorded = {"model asked for" if key == "model" else key: value for key, value in options.items()}
        circumstances = documents.provenance(unwrapped(policy)[0], hashes, recorded)
        write_report(report, policy, predictions=views, labels=answers, circumstances=circumstances)
    if consensus is not None:
        write_table(consensus, files.consensus_table(unwrapped(policy)[0], views, answers))
    return _show(talk, policy, out, report, consensus)


def _show(talk: Talk, policy: Any, out: Path, report: Path | None, consensus: Path | None) -> None:
    """Print the policy: whether it helps, and a bar chart of the heaviest views."""
    policy, sequential, conformal = unwrapped(policy)
    document = documents.policy_document(policy)
    sentences = [*documents.headline(policy), *documents.views_in_words(policy)]
    if sequential is not None:
        names = ("stages", "threshold", "tolerance", "loss", "loss_upper")
        document["sequential"] = to_plain({name: getattr(sequential, name) for name in names})
        sentences += documents.stops_in_words(sequential)
    if conformal is not None:
        document["sets"] = {"levels": conformal.levels.tolist(), "method": conformal.method, "covers": conformal.covers}
        sentences.append(documents.guarantee_in_words(conformal))
    views = sorted(document["views"], key=lambda view: -view["weight"])[:_SHOWN]
    rows = [[view["name"], *(f"{view[key]:.3f}" for key in ("weight", "low", "high"))] for view in views]
    head, line, *lines = talk.table([["view", "weight", "5 %", "95 %"], *rows]).splitlines()
    bars = [f"{row}   {'█' * round(_BAR * view['weight'])}".rstrip() for row, view in zip(lines, views, strict=True)]
    targets = {"policy": out, "report": report, "consensus": consensus}
    document["written"] = {name: path if path is None else str(path) for name, path in targets.items()}
    written = " and ".join(str(path) for path in targets.values() if path is not None)
    talk.result(document, "\n".join([*sentences, "", head, line, *bars, "", f"wrote {written}"]))


@app.command()
@command
def predict(
    talk: Talk,
    predictions: running.PredictionsFile,
    policy: running.PolicyFile,
    out: Annotated[Path, Out(help="Where to write the predictions (.parquet or .csv; a folder with --dense).")],
    level: Annotated[float | None, Option(min=0.01, max=0.999, help="Of the intervals of numbers, 0.9.")] = None,
    sets: running.Sets = None,
    calibration: Annotated[
        tuple[Path, Path] | None, running.Pair(help="With --sets: labelled rows that the policy was not fitted to.")
    ] = None,
    dense: Annotated[bool, Option("--dense", help="PREDICTIONS is a folder of images; write label maps.")] = False,
    predictor: Annotated[str | None, running.Predictor(help="With --dense: makes the torch module.")] = None,
    weights: Annotated[Path | None, Option(help="With --dense: weights of the module (.pt).")] = None,
    described: Annotated[Path | None, running.Described(help="With --dense: the views (.toml or .json).")] = None,
    entropy: Annotated[bool, Option("--entropy", help="With --dense: write entropy maps, in nats, too.")] = False,
) -> None:
    """Turn the views of new inputs into one predictive distribution each.

    Example:

        vbtta predict new_preds.npz --policy policy.json --out predictions.parquet
    """
    needs("--dense", dense, predictor=predictor, weights=weights, views=described, entropy=entropy)
    needs("--sets", sets, calibration=calibration)
    refuse(dense and bool(sets or level), "--sets and --level are for rows of predictions; leave out --dense")
    refuse(dense and not (predictor and described), "--dense needs --predictor and --views")
    if dense and predictor and described:
        from vbtta.cli.dense import load_module, predict_maps

        module = load_module(predictor, weights, described, policy)
        return predict_maps(module, predictions, out, talk, entropy=entropy)
    writable(out, ".parquet", ".csv")
    views = files.read_predictions(predictions)
    rule: Any = load_policy(existing(policy, "a policy (.json)"))
    numbers = unwrapped(rule)[0].task == "regression"
    refuse(level is not None and not numbers, "--level is for intervals of numbers; give --sets for sets of classes")
    known = rule.levels.tolist() if isinstance(rule, ConformalPolicy) else []
    if calibration is not None:
        rule = rule.policy if known else rule
        pair = files.read_pair(*calibration, unwrapped(rule)[0].task, talk)
        rule = conformalize(rule, *pair, level=sets or 0.9)
    elif missing := [level for level in sets or () if level not in known]:
        remedy = f"give labelled rows as --calibration PREDICTIONS LABELS, or fit with --sets {missing[0]:g}"
        raise UsageError(f"{policy} has no sets of level {missing[0]:g}; {remedy}")
    sets = sets or known
    try:
        ids = np.arange(len(views)) if views.ids is None else views.ids
        prediction = rule.predict(views)
        table = {"instance": ids, **prediction.columns(level or 0.9)}
        if prediction.passes is not None:
            table["passes"] = prediction.passes
        if sets:
            table |= rule.columns(views, sets)
    except ValueError as error:
        raise ValueError(f"{policy} does not fit {predictions}: {error}") from error
    write_table(out, table)
    columns = ", ".join(list(table)[:6]) + (", ..." if len(table) > 6 else "")
    document = {"written": str(out), "rows": len(views), "columns": list(table)}
    return talk.result(document, f"wrote {len(views):,} predictions to {out}: {columns}")


@app.command()
@command
def compare(
    talk: Talk,
    predictions: running.PredictionsFile,
    labels: running.LabelsFile,
    test: Annotated[tuple[Path, Path], running.Pair(help="Predictions and labels to score on.")],
    task: Annotated[running.Task | None, Option(help="By default classification where C > 1.")] = None,
    methods: Annotated[str | None, Option(help="Names with commas between them; by default all.")] = None,
    out: Annotated[Path | None, Out(help="Write the comparison (.json).")] = None,
    resamples: Annotated[int, Option(min=1, help="Of the bootstrap.")] = 2000,
    sets: Annotated[float | None, Option(min=0.01, max=0.999, help="Compare sets of this level, too.")] = None,
    seed: running.Seed = 0,
) -> None:
    """Compare the policy with no augmentation, plain averages and other ways to weight views.

    Example:

        vbtta compare preds.npz labels.csv --test test.npz test.csv --out comparison.json
    """
    writable(out, ".json")
    likely_task = "classification" if files.read_predictions(predictions).outputs.shape[2] > 1 else "regression"
    task_name = likely_task if task is None else task.value
    kind = "classification" if task_name == "multilabel" else task_name
    known = default_methods(kind)
    names = known if methods is None else [name.strip() for name in methods.split(",")]
    try:
        entries(names, kind, seed)
    except ValueError as error:
        hint = next((nearest(name, known) for name in names if name not in known), "")
        raise UsageError(f"--methods {methods}: {error}{hint}") from error
    pairs = [files.read_pair(*paths, task_name, talk) for paths in ((predictions, labels), test)]
    if task_name == "multilabel":
        pairs = [(views.as_binary(), sets) for views, sets in pairs]
    options: dict[str, Any] = {"resamples": resamples, "sets": sets, "seed": seed, "progress": talk.progress}
    outcome = vbtta.compare(*pairs[0], *pairs[1], task=kind, methods=names, **options)
    document = documents.comparison_document(outcome)
    if out is not None:
        running.write_json(out, document)
    closing = closing_sentences(document["n_labels"], document["n_instances"], document["notes"])
    text = "\n".join([files.comparison_table(document, talk), "", *closing, *documents.gain_in_words(document)])
    talk.result(document, text + ("" if out is None else f"\n\nwrote {out}"))


@app.command()
@command
def diagnose(
    talk: Talk,
    predictions: running.PredictionsFile,
    policy: running.PolicyFile,
    labels: Annotated[
        Path | None, Option(help="Labels of the predictions, for more checks (.csv or .parquet).")
    ] = None,
    incoming: Annotated[Path | None, Option(help="Predictions for new inputs, to be compared with the others.")] = None,
    refit: Annotated[bool, Option(help="Fit again without each view and under other priors.")] = True,
    out: Annotated[Path | None, Out(help="Write the findings (.json).")] = None,
    seed: running.Seed = 0,
) -> None:
    """Check a policy's assumptions on the predictions it was fitted to.

    Example:

        vbtta diagnose preds.npz --policy policy.json --labels labels.csv
    """
    writable(out, ".json")
    rule = unwrapped(load_policy(existing(policy, "a policy (.json)")))[0]
    if labels is None:
        views, sets = files.read_predictions(predictions), None
    else:
        views, sets = files.read_pair(predictions, labels, rule.task, talk)
    new = None if incoming is None else files.read_predictions(incoming)
    for path, part in ((predictions, views), (incoming, new)):
        try:
            if part is not None:
                rule.predict(part.take(slice(0, 1)))
        except ValueError as error:
            raise ValueError(f"{policy} does not fit {path}: {error}") from error
    talk.note("checking ...")
    diagnosis = vbtta.diagnose(rule, views, sets, incoming=new, refit=refit, seed=seed)
    document = documents.diagnosis_document(diagnosis)
    if out is not None:
        running.write_json(out, document)
    talk.result(document, diagnosis.summary() + ("" if out is None else f"\n\nwrote {out}"))


@app.command()
@command
def report(
    talk: Talk,
    folder: Annotated[Path, Argument(metavar="RUN-FOLDER", help="The folder with the files of a run.")],
    out: Annotated[Path | None, Out(help="Where to write the page; by default report.html in the folder.")] = None,
    data: Annotated[
        Path | None, Option(help="Of a segmentation: folder of images, to show the worst and best.")
    ] = None,
    masks: Annotated[list[Path] | None, Option(help="With --data: folder of masks; several: one a rater.")] = None,
    predictor: Annotated[str | None, running.Predictor(help="With --data: makes the torch module.")] = None,
    weights: Annotated[Path | None, Option(help="With --data: weights of the module (.pt).")] = None,
    described: Annotated[Path | None, running.Described(help="With --data: the views (.toml or .json).")] = None,
) -> None:
    """Make a self-contained HTML page from a folder with policy.json.

    What else is there goes in too: predictions.npz, labels.csv (or .parquet), test_predictions.npz, test_labels.csv,
    comparison.json, diagnosis.json, run.json. With --data the network runs on all images that have masks, and the
    worst and the best are shown with prediction, truth, entropy and the map of every view.

    Example:

        vbtta report run-folder
    """
    needs("--data", data, masks=masks, predictor=predictor, weights=weights, views=described)
    incomplete = data is not None and not (masks and predictor and described)
    refuse(incomplete, "--data needs --masks, --predictor and --views")
    if not folder.is_dir():
        raise UsageError(f"{folder}: no such folder; give the one that holds policy.json")
    target = folder / "report.html" if out is None else out
    writable(target, ".html")
    existing(folder / "policy.json", "a policy that vbtta fit wrote, called policy.json")
    parts = {}
    if data is not None and masks and predictor and described:
        from vbtta.cli.dense import load_module, map_pictures

        module = load_module(predictor, weights, described, folder / "policy.json")
        parts["maps"] = map_pictures(module, data, masks, talk)
    used = files.write_run_report(folder, target, talk, replaces=out is not None, **parts)
    talk.result({"written": str(target), "used": used}, f"wrote {target} from {', '.join(used)}")
