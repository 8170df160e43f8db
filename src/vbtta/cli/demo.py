"""`vbtta demo`: the whole story on data that ships with scikit-learn."""

__all__ = ["demo"]

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from vbtta.cli.options import Seed
from vbtta.cli.running import Debug, Json, Quiet, Talk, command

_METHODS = ("original", "original+t", "uniform", "uniform+t", "geometric", "best_view", "aug_tta", "greedy", "vbtta")
_EXAMPLES = 4


@command
def demo(
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the files of the run.")] = Path("vbtta-demo"),
    seed: Seed = 0,
    as_json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Train a small network on handwritten digits, collect views, fit, compare, diagnose and write a report.

    Example:

        vbtta demo --out runs/demo
    """
    talk = Talk(as_json, quiet)
    started = time.perf_counter()
    out.mkdir(parents=True, exist_ok=True)
    from vbtta.cli.compare import comparison_text
    from vbtta.cli.report import write_run_report
    from vbtta.cli.story import SKILL
    from vbtta.report.documents import policy_document
    from vbtta.report.words import annotators_in_words, gain_in_words, views_in_words

    with _one_thread():
        policy, comparison, summary = _run(out, seed, talk)
    talk.note("writing the report ...")
    write_run_report(out, out / "report.html", Talk(False, True))
    seconds = time.perf_counter() - started
    text = "\n".join(
        [
            "What it did",
            *(f"  {line}" for line in _told(policy)),
            "",
            "What it found",
            *(f"  {line}" for line in views_in_words(policy)),
            *(f"  {line}" for line in gain_in_words(comparison)),
            *(f"  {line}" for line in annotators_in_words(policy, SKILL)),
            "",
            comparison_text({**comparison, "methods": comparison["methods"]}, talk).partition("\n\n")[0],
            "",
            "Diagnosis",
            *(f"  {line}" for line in summary),
            "",
            f"Done in {seconds:.0f} s. Open {out / 'report.html'}",
        ]
    )
    document = {
        **policy_document(policy),
        "comparison": comparison,
        "diagnosis": list(summary),
        "skill": SKILL,
        "written": str(out / "report.html"),
        "seconds": seconds,
    }
    talk.result(document, text)


def _one_thread() -> Any:
    """So little data is worked on fastest by one thread; torch must be there to be told."""
    from contextlib import suppress

    from vbtta._support.extras import require

    with suppress(ImportError):
        require("torch", "torch")
    require("sklearn.datasets", "cli")
    return require("threadpoolctl", "cli").threadpool_limits(1)


def _run(out: Path, seed: int, talk: Talk) -> tuple[Any, dict[str, Any], list[str]]:
    """Do the work; leaves the files of a run in the folder."""
    from functools import partial

    import numpy as np

    from vbtta.cli.compare import write_json
    from vbtta.cli.files import read_labels
    from vbtta.cli.story import SKILL, annotate, make_views, split, train
    from vbtta.collect import collect_views
    from vbtta.comparison import compare
    from vbtta.diagnostics import diagnose
    from vbtta.fit import fit_policy
    from vbtta.report.documents import comparison_document, diagnosis_document
    from vbtta.specs import CategoricalLatent

    story, views = split(seed), make_views()
    talk.note(f"training a small network on {len(story.train[0])} digits ...")
    network, kind = train(*story.train, seed=seed)
    talk.note(f"predicting {len(story.calibration[0]) + len(story.test[0]):,} digits under {len(views)} views ...")
    calibration, test = (
        collect_views(network, images, views, draws=10, keep_draws=60, seed=seed + place)
        for place, (images, _) in enumerate((story.calibration, story.test))
    )
    calibration.save(out / "predictions.npz")
    test.save(out / "test_predictions.npz")
    _write_csv(out / "labels.csv", ("instance", "annotator", "label"), *annotate(story.calibration[1], seed))
    _write_csv(out / "test_labels.csv", ("label",), story.test[1])
    labels = read_labels(out / "labels.csv").sets.align(len(calibration))

    talk.note(f"fitting to {len(labels):,} labels of three annotators ...")
    model = CategoricalLatent(noise="annotator")  # one accuracy an annotator
    policy = fit_policy(calibration, labels, task="classification", model=model, seed=seed)
    policy.save(out / "policy.json")
    talk.note(f"comparing {len(_METHODS)} methods on {len(test)} digits with clean labels ...")
    fit = partial(fit_policy, task="classification", model=model, seed=seed)
    methods = {name: fit if name == "vbtta" else name for name in _METHODS}
    outcome = compare(calibration, labels, test, story.test[1], task="classification", methods=methods, seed=seed)
    comparison = comparison_document(outcome)
    write_json(out / "comparison.json", comparison)
    talk.note("diagnosing ...")
    found = diagnose(policy, calibration, labels, incoming=test, seed=seed)
    write_json(out / "diagnosis.json", diagnosis_document(found))

    prediction: Any = policy.predict(test)
    rows = np.argsort(-prediction.mutual_information, kind="stable")[:_EXAMPLES]
    images = np.stack([_pictures(view, story.test[0][rows], seed) for view in views], axis=1)  # (E, K, 8, 8)
    _write_arrays(out / "examples.npz", rows=rows, names=np.array([view.name for view in views]), images=images)
    text = [
        f"{len(story.train[0])} digits trained {kind}; {len(calibration)} more were labelled by three simulated "
        f"annotators of different skill, {len(labels):,} labels in all; {len(test)} with clean labels are the test.",
        f"The network saw every digit under {len(views)} views, some of which make another digit of it.",
    ]
    write_json(
        out / "run.json",
        {
            "story": {"title": "Handwritten digits, three annotators, twelve views", "text": text, "skill": SKILL},
            "options": {"command": "vbtta demo", "seed": seed},
        },
    )
    return policy, comparison, found.summary().splitlines()


def _told(policy: Any) -> list[str]:
    from vbtta.cli.story import SKILL

    skills = ", ".join(f"{name} {100 * value:.0f} %" for name, value in SKILL.items())
    return [
        "Trained a small network on scikit-learn's handwritten digits and looked at 700 more under "
        f"{len(policy.names)} views.",
        f"Simulated three annotators who are right with different probability ({skills}); "
        "the fit knows the form of their errors, not these numbers.",
        f"Inferred the weights of the views and the skill of the annotators together ({type(policy.model).__name__}).",
        "Compared methods on digits with clean labels, which no method was fitted to.",
    ]


def _pictures(view: Any, images: Any, seed: int) -> Any:
    """What a view makes of some images: (E, 8, 8) uint8."""
    import numpy as np

    from vbtta._support.random import RowStreams
    from vbtta.augment.base import apply_view

    streams = RowStreams(seed, view.name, 0, np.arange(len(images))) if view.stochastic else None
    seen = np.asarray(apply_view(view, images, streams))
    return (255 * seen[:, 0].clip(0, 1)).round().astype(np.uint8)


def _write_csv(path: Path, header: tuple[str, ...], *columns: Any) -> None:
    import csv

    from vbtta._support.files import atomic_path

    with atomic_path(path) as temporary, open(temporary, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(zip(*(column.tolist() for column in columns), strict=True))


def _write_arrays(path: Path, **arrays: Any) -> None:
    import numpy as np

    from vbtta._support.files import atomic_path

    with atomic_path(path) as temporary, open(temporary, "wb") as file:
        np.savez(file, allow_pickle=False, **arrays)
