"""`vbtta demo`: training, views, fit, comparison, diagnosis and report on data that ships with scikit-learn."""

__all__ = ["demo"]

import time
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from vbtta.cli import running

_METHODS = ("original", "original+t", "uniform", "uniform+t", "geometric", "best_view", "aug_tta", "greedy", "vbtta")
_EXAMPLES = 4


@running.command
def demo(
    out: Annotated[Path, Option("--out", "-o", help="Folder for the files of the run.")] = Path("vbtta-demo"),
    seed: running.Seed = 0,
    as_json: running.Json = False,
    quiet: running.Quiet = False,
    debug: running.Debug = False,
) -> None:
    """Train a small network on handwritten digits, collect views, fit, compare, diagnose and write a report.

    Example:

        vbtta demo --out runs/demo
    """
    talk = running.Talk(as_json, quiet)
    started = time.perf_counter()
    out.mkdir(parents=True, exist_ok=True)
    from vbtta.cli.compare import comparison_table
    from vbtta.cli.digits import SKILL
    from vbtta.cli.report import write_run_report
    from vbtta.report.documents import annotators_in_words, gain_in_words, policy_document, views_in_words

    with _one_thread():
        policy, comparison, summary = _run(out, seed, talk)
    talk.note("writing the report ...")
    write_run_report(out, out / "report.html", running.Talk(False, True))
    seconds = time.perf_counter() - started
    skills = ", ".join(f"{name} {100 * value:.0f} %" for name, value in SKILL.items())
    steps = [
        "Trained a small network on scikit-learn's handwritten digits and looked at 700 more under "
        f"{len(policy.names)} views.",
        f"Simulated three annotators who are right with different probability ({skills}); "
        "the fit knows the form of their errors, not these numbers.",
        f"Inferred the weights of the views and the skill of the annotators together ({type(policy.model).__name__}).",
        "Compared methods on digits with clean labels, which no method was fitted to.",
    ]
    findings = [*views_in_words(policy), *gain_in_words(comparison), *annotators_in_words(policy, SKILL)]
    sections = {"What it did": steps, "What it found": findings, "Diagnosis": summary}
    texts = ["\n  ".join([title, *lines]) for title, lines in sections.items()]
    texts.insert(2, comparison_table(comparison, talk))
    texts.append(f"Done in {seconds:.0f} s. Open {out / 'report.html'}")
    document = {
        **policy_document(policy),
        "comparison": comparison,
        "diagnosis": summary,
        "skill": SKILL,
        "written": str(out / "report.html"),
        "seconds": seconds,
    }
    talk.result(document, "\n\n".join(texts))


def _one_thread() -> Any:
    """Limit to one thread, which is fastest for so little data; torch must be loaded before the limit."""
    from contextlib import suppress

    from vbtta._support.checks import require

    with suppress(ImportError):
        require("torch", "torch")
    require("sklearn.datasets", "cli")
    return require("threadpoolctl", "cli").threadpool_limits(1)


def _run(out: Path, seed: int, talk: running.Talk) -> tuple[Any, dict[str, Any], list[str]]:
    """Write the files of a run to the folder; policy, comparison and summary of the diagnosis."""
    from functools import partial

    import numpy as np

    from vbtta.cli.digits import SKILL, annotate, make_views, split, train
    from vbtta.cli.files import read_labels
    from vbtta.cli.parts import write_arrays
    from vbtta.collect import collect_views
    from vbtta.comparison import compare
    from vbtta.diagnostics import diagnose
    from vbtta.fit import fit_policy
    from vbtta.models.categorical_latent.spec import CategoricalLatent
    from vbtta.report.documents import comparison_document, diagnosis_document

    digits, views = split(seed), make_views()
    talk.note(f"training a small network on {len(digits.train[0])} digits ...")
    network, kind = train(*digits.train, seed=seed)
    talk.note(f"predicting {len(digits.calibration[0]) + len(digits.test[0]):,} digits under {len(views)} views ...")
    calibration, test = (
        collect_views(network, images, views, draws=10, keep_draws=60, seed=seed + place)
        for place, (images, _) in enumerate((digits.calibration, digits.test))
    )
    calibration.save(out / "predictions.npz")
    test.save(out / "test_predictions.npz")
    columns = zip(("instance", "annotator", "label"), annotate(digits.calibration[1], seed), strict=True)
    running.write_table(out / "labels.csv", dict(columns))
    running.write_table(out / "test_labels.csv", {"label": digits.test[1]})
    labels = read_labels(out / "labels.csv").sets.align(len(calibration))

    talk.note(f"fitting to {len(labels):,} labels of three annotators ...")
    fit = partial(fit_policy, task="classification", model=CategoricalLatent(noise="annotator"), seed=seed)
    policy = fit(calibration, labels)
    policy.save(out / "policy.json")
    talk.note(f"comparing {len(_METHODS)} methods on {len(test)} digits with clean labels ...")
    methods = {name: fit if name == "vbtta" else name for name in _METHODS}
    outcome = compare(calibration, labels, test, digits.test[1], task="classification", methods=methods, seed=seed)
    comparison = comparison_document(outcome)
    running.write_json(out / "comparison.json", comparison)
    talk.note("diagnosing ...")
    diagnosis = diagnose(policy, calibration, labels, incoming=test, seed=seed)
    running.write_json(out / "diagnosis.json", diagnosis_document(diagnosis))

    prediction: Any = policy.predict(test)
    rows = np.argsort(-prediction.mutual_information, kind="stable")[:_EXAMPLES]
    images = np.stack([_pictures(view, digits.test[0][rows], seed) for view in views], axis=1)  # (E, K, 8, 8)
    names = np.array([view.name for view in views])
    write_arrays(out / "examples.npz", {"rows": rows, "names": names, "images": images})
    text = [
        f"{len(digits.train[0])} digits trained {kind}; {len(calibration)} more were labelled by three simulated "
        f"annotators of different skill, {len(labels):,} labels in all; {len(test)} with clean labels are the test.",
        f"The network saw every digit under {len(views)} views, some of which make another digit of it.",
    ]
    story = {"title": "Handwritten digits, three annotators, twelve views", "text": text, "skill": SKILL}
    running.write_json(out / "run.json", {"story": story, "options": {"command": "vbtta demo", "seed": seed}})
    return policy, comparison, diagnosis.summary().splitlines()


def _pictures(view: Any, images: Any, seed: int) -> Any:
    """The augmented images of a view: (E, 8, 8) uint8."""
    import numpy as np

    from vbtta._support.random import RowStreams
    from vbtta.augment.base import apply_view

    streams = RowStreams(seed, view.name, 0, np.arange(len(images))) if view.stochastic else None
    augmented = np.asarray(apply_view(view, images, streams))
    return (255 * augmented[:, 0].clip(0, 1)).round().astype(np.uint8)
