"""Makes tables and pictures of README and docs of the records: `python benchmarks/tables.py`; --check says if they are stale."""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gcnn import GROUPS
from gcnn.irreps import irreps, multiplications

ROOT = Path(__file__).parent.parent
RECORDS = ROOT / "benchmarks" / "records"

FIRST, SECOND, THIRD = "2026-11-15_rotated_mnist", "2026-11-15_authors_settings", "2026-11-15_second_settings"
FOURTH, FIFTH = "2026-11-15_third_settings", "2026-11-16_rotated_mnist"
PROGRAM = "2026-11-16_authors_program"
FUSED, SERVING, HOST = "2026-11-16_fused_h200", "2026-11-16_serving_h200", "2026-11-19_pointwise_h200"
POINTWISE = "2026-11-20_pointwise3_h200"
CPU, OLDER_CPU = "2026-11-19_speed_cpu", "2026-11-15_speed_cpu"
ROWS = [  # folder, record, what it is, the paper's number
    (SECOND, "paper_z2cnn", "Z2CNN, the authors' settings", "5.03 ± 0.20"),
    (FIRST, "paper_z2cnn", "Z2CNN, no small turns, norms estimated without dropout", ""),
    (THIRD, "paper_p4cnn-rotpool", "P4CNNRotationPooling, the authors' settings", "3.21 ± 0.12"),
    (FOURTH, "paper_p4cnn-rotpool", "the same once more", ""),
    (FIRST, "paper_p4cnn-rotpool", "P4CNNRotationPooling, no small turns, norm after the pooling", ""),
    (SECOND, "paper_p4cnn", "P4CNN, the authors' settings", "2.28 ± 0.04"),
    (FOURTH, "paper_p4cnn", "the same once more, convolutions in TF32", ""),
    (FIFTH, "paper_p4cnn", "the same once more, in exact float32", ""),
    (PROGRAM, "authors_p4cnn", "the same, turned as in the authors' program, norms estimated on turned digits", ""),
    (FIRST, "paper_p4cnn", "P4CNN, no small turns", ""),
    (FIRST, "decay_p4cnn", "P4CNN, no small turns, learning rate falling to zero, weight decay", ""),
    (THIRD, "decay_p4cnn", "the same with a dropout of 0.1 (`decay/p4cnn`)", ""),
    (FOURTH, "best_p4", "a p4 ResNet, digits turned by any angle in training (`best/p4`)", ""),
    (THIRD, "best_p4", "the same for 60 epochs instead of 140, dropout 0.2 instead of 0.3", ""),
]


def record(folder: str, name: str) -> dict[str, Any]:
    """One record."""
    found: dict[str, Any] = json.loads((RECORDS / folder / f"{name}.json").read_text())
    return found


def rotated_mnist() -> str:
    """Table 1 of the paper beside ours."""
    rows = ["| network | parameters | paper | ours | each seed |", "|---|---|---|---|---|"]
    for folder, name, words, paper in ROWS:
        r = record(folder, name)
        each = " ".join(f"{row['test_error']:.2f}" for row in r["seeds"])
        rows.append(f"| {words} | {r['parameters']:,} | {paper} | {r['mean']:.2f} ± {r['std']:.2f} | {each} |")
    r, fast, graphs = record(SECOND, "paper_p4cnn"), record(FIRST, "compile_graphs"), record(THIRD, "decay_p4cnn")
    tried = record(FIFTH, "validation_best")["rows"]
    chosen = " and ".join(f"{row['mean']:.2f} ± {row['std']:.2f} % with {row['set']['epochs']}" for row in tried)
    rows.append("")
    rows.append(
        f"Test error in percent on the 50,000 digits of rotated MNIST, regenerated; mean and standard deviation of "
        f"{len(r['seeds'])} seeds, last epoch, nothing chosen on the test set; of the two last rows the better was chosen by "
        "validation, when both had been tested.\n\n"
        "The authors turned training digits by up to 3.14 degrees and kept the learning rate: now and then the last epoch is a "
        "bad one, as in two of the twenty runs of P4CNN. Their program turned digits by bilinear interpolation after "
        "normalising, with the mean outside; ours turns bicubically, with black outside, but for one row. "
        f"The epochs of `best/p4` were chosen on the validation digits, five seeds each, by a hair ({chosen}), when both had "
        "been tested. "
        f"{r['device']}, torch {r['torch']}; an epoch of P4CNN takes {graphs['seeds'][0]['median_epoch_seconds']:.2f} s, and "
        f"{fast['seeds'][0]['median_epoch_seconds']:.2f} s with `--compile`. Records: `benchmarks/records/{FIRST}`, "
        f"`{SECOND}`, `{THIRD}`, `{FOURTH}`, `{FIFTH}` and `{PROGRAM}`."
    )
    return "\n".join(rows)


SUMMARY = [  # what it is, the paper's number, every record of it
    ("Z2CNN", "5.03 ± 0.20", [(SECOND, "paper_z2cnn")]),
    ("P4CNNRotationPooling", "3.21 ± 0.12", [(THIRD, "paper_p4cnn-rotpool"), (FOURTH, "paper_p4cnn-rotpool")]),
    ("P4CNN", "2.28 ± 0.04", [*((folder, "paper_p4cnn") for folder in (SECOND, FOURTH, FIFTH)), (PROGRAM, "authors_p4cnn")]),
    ("P4CNN, learning rate falling to zero (`decay/p4cnn`)", "", [(THIRD, "decay_p4cnn")]),
    ("a p4 ResNet, digits turned by any angle in training (`best/p4`)", "", [(FOURTH, "best_p4")]),
]


def summary() -> str:
    """Table 1 of the paper beside ours, in short: all runs of a network with the authors' settings together."""
    rows = ["| network | parameters | paper | ours | median | runs |", "|---|---|---|---|---|---|"]
    for words, paper, records in SUMMARY:
        found = [record(*each) for each in records]
        errors = [row["test_error"] for r in found for row in r["seeds"]]
        mean = f"{statistics.mean(errors):.2f} ± {statistics.stdev(errors):.2f}"
        middle = statistics.median(errors)
        rows.append(f"| {words} | {found[0]['parameters']:,} | {paper} | {mean} | {middle:.2f} | {len(errors)} |")
        if words == "P4CNN":
            bad = [f"{e:.2f}" for e in errors if e > middle + 0.3]
            few = f"{len(bad)} of the {len(errors)} of P4CNN did, with {' and '.join(bad)}"
    rows.append("")
    rows.append(
        "Test error in percent on the 50,000 digits of rotated MNIST, regenerated; last epoch, nothing chosen on the test set. "
        "The first three rows have the authors' settings, a constant learning rate among them, with which now and then a run "
        f"ends in a bad epoch: {few}. [All runs](docs/results.md#rotated-mnist)."
    )
    return "\n".join(rows)


EAGER, LOOPS = "2026-11-18_eager_h200", "2026-11-18_loops_h200"
HOW = ("graph", "eager")  # in a table

CIFAR10, SHARP, LONGER = "2026-11-15_cifar10", "2026-11-16_cifar10", "2026-11-16_cifar10_longer"
VOLUMES = "2026-11-16_volumes"
TABLE2 = [  # network, group, the paper's errors without and with augmentation
    ("allcnn-c", "p1", 9.44, 8.86),
    ("allcnn-c", "p4", 8.84, 7.67),
    ("allcnn-c", "p4m", 7.59, 7.04),
    ("resnet44", "p1", 9.45, 5.61),
    ("resnet44", "p4m", 6.46, 4.94),
    ("resnet26", "p1", 8.95, 5.27),
    ("resnet26", "p4m", 5.74, 4.19),
]
# the same networks with other settings: without and with augmentation
OTHERS = {
    ("resnet26", "p1"): ("sharp_resnet26-p1", "longer_resnet26-p1_plus"),
}
NAMES = {"allcnn-c": "All-CNN-C", "resnet44": "ResNet44", "resnet26": "ResNet26"}


def over_seeds(folder: str, name: str) -> dict[str, Any] | None:
    """The records of one recipe, whose seeds may lie in several files, as one like the first; None where there is none."""
    found = [json.loads(path.read_text()) for path in sorted((RECORDS / folder).glob(f"{name}_seed*.json"))]
    return {**found[0], "seeds": [row for r in found for row in r["seeds"]]} if found else None


def newest(name: str) -> dict[str, Any] | None:
    """The records of a recipe for CIFAR-10 as it is now."""
    found = (over_seeds(folder, name) for folder in (LONGER, SHARP, CIFAR10))
    return next((r for r in found if r), None)


def error(r: dict[str, Any] | None, key: str = "test_error", few: int = 0) -> str:
    """Mean, standard deviation and number of seeds, as far as there are; with `few` decimals and no number."""
    if r is None:
        return "not yet"
    errors = [row[key] for row in r["seeds"]]
    if few:
        return f"{statistics.mean(errors):.{few}f} ± {statistics.stdev(errors):.{few}f}"
    if len(errors) == 1:
        return f"{errors[0]:.2f} (1 seed)"
    return f"{statistics.mean(errors):.2f} ± {statistics.stdev(errors):.2f} ({len(errors)} seeds)"


def cifar10() -> str:
    """Table 2 of the paper beside ours."""
    rows = [
        "| network | group | parameters | CIFAR10: paper | ours | CIFAR10+: paper | ours | epochs | images/s | "
        "s an epoch | change of the logits |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, group, plain, plus in TABLE2:
        rows.append(row_of_table2(name, group, plain, plus, *(newest(f"fast_{name}-{group}{more}") for more in ("", "_plus"))))
        if (name, group) in OTHERS:
            others = (over_seeds(LONGER, other) for other in OTHERS[name, group])
            rows.append(row_of_table2(name, group, plain, plus, *others))
    first = {group: over_seeds(CIFAR10, f"first_resnet44-{group}_plus") for group in ("p1", "p4m")}
    r = over_seeds(SHARP, "fast_allcnn-c-p1")
    assert r is not None
    before = [
        f"{NAMES[name]}{more} "
        + ", ".join(f"{over_seeds(CIFAR10, f'fast_{name}-{group}{plus}')['seeds'][0]['test_error']:.2f}" for group in groups)
        for name, plus, more, groups in (
            ("allcnn-c", "", "", ("p1", "p4", "p4m")),
            ("allcnn-c", "_plus", " with augmentation (50 epochs)", ("p1", "p4", "p4m")),
            ("resnet44", "", "", ("p1", "p4m")),
            ("resnet44", "_plus", " with augmentation (30 epochs)", ("p1", "p4m")),
        )
    ]
    shorter = [
        ", ".join(error(over_seeds(SHARP, f"fast_allcnn-c-{group}{plus}")) for group in ("p1", "p4", "p4m"))
        for plus in ("", "_plus")
    ]
    share, between = newest("fast_resnet44-p4m_plus"), over_seeds(LONGER, "sharp_resnet26-p1_plus")
    assert share is not None
    rows.append("")
    rows.append(
        "Test error in percent, last epoch, recipes `fast/*`, settings chosen on the last 10,000 training images, ResNets with "
        "one seed so far; the paper trained for 300 epochs or more. Sharp epochs are sharpness-aware and take twice as long. Of "
        "two rows for one network the second has later settings, chosen when the first had been tested.\n\n"
        f"Without sharp epochs, in the same order of groups, {'; '.join(before)}. With 50 sharp epochs All-CNN-C had "
        f"{shorter[0]}, and with augmentation {shorter[1]}. "
        "Its 80 were chosen when these were known: on held-out images they brought p4m from "
        f"{held_out('p4m', 50)} to {held_out('p4m', 80)}, and the planar network "
        f"from {held_out('p1', 0)} to {held_out('p1', 80)}. The second row of the planar ResNet26 has the settings of "
        f"ResNet44, with which the p4m network was not trained; with 30 epochs, 10 of them sharp, it had "
        f"{error(between)} with augmentation. All-CNN-C sees whitened images, as in the paper, ResNets plain ones. Images "
        f"a second in training, of the first seed, bfloat16, {r['device']}, torch {r['torch']}; of a step of the p4m ResNet44, "
        f"{100 * share['share_of_convolutions']:.0f} % are convolutions. Steps alone, for some seconds: "
        f"{rates_alone()}. The last column is the largest relative change of the logits under the group: strides on even sizes, "
        "and the head of the ResNets, are not invariant, as in the paper; "
        '`downsample="pool"` and `invariant=True` are. With a first setting for CIFAR10+ (24 epochs, more weight decay) ResNet44 '
        f"had {error(first['p1'])} for Z2 and {error(first['p4m'])} for p4m; it was changed for its training error, when these "
        f"were known. Records: `benchmarks/records/{CIFAR10}`, `{SHARP}` and `{LONGER}`."
    )
    return "\n".join(rows)


def row_of_table2(
    name: str, group: str, plain: float, plus: float, ours: dict[str, Any] | None, augmented: dict[str, Any] | None
) -> str:
    """A network's errors, without and with augmentation, beside the paper's."""
    known = [r for r in (ours, augmented) if r is not None]
    cells = [""] * 5
    if known:
        r = known[0]
        rate, seconds = (
            r["seeds"][0][key] for key in ("images_per_second", "median_epoch_seconds")
        )  # others may have shared the GPU
        change = max(row["equivariance_error"] for row in r["seeds"])
        epochs = " and ".join(dict.fromkeys(map(epochs_of, known)))
        cells = [f"{r['parameters']:,}", epochs, f"{rate:,.0f}", f"{seconds:.1f}", f"{change:.2g}" if group != "p1" else ""]
    return (
        f"| {NAMES[name]} | {'Z2' if group == 'p1' else group} | {cells[0]} | {plain:.2f} | {error(ours)} | {plus:.2f} | "
        f"{error(augmented)} | {' | '.join(cells[1:])} |"
    )


def held_out(group: str, epochs: int) -> str:
    """The error of All-CNN-C on the last 10,000 training images, without augmentation; 0 epochs are those of its first recipe."""
    tried = [json.loads((RECORDS / folder / "validation.json").read_text()) for folder in (SHARP, LONGER)]
    settings = {"epochs": epochs} if epochs else {"sharpness": 0.1}
    (found,) = [r for rows in tried for r in rows if r["recipe"] == f"fast/allcnn-c-{group}" and r["set"] == settings]
    return f"{found['error']:.2f}"


def epochs_of(r: dict[str, Any]) -> str:
    """How long a network was trained, and how much of it was sharpness-aware."""
    epochs, sharp = r["config"]["epochs"], r["config"].get("sharpness") and (r["config"]["sharp_epochs"] or r["config"]["epochs"])
    return f"{epochs} ({'all' if sharp == epochs else sharp} sharp)" if sharp else str(epochs)


def rates_alone() -> str:
    """Images a second of the p4m ResNet44, and of the planar network with as many planes."""
    words = []
    for row in record(CIFAR10, "throughput_later")["rows"]:
        if row["name"] == "fast/resnet44-p4m":
            network = "the planar network with as many planes" if "group" in row["changes"] else "p4m ResNet44"
            more = " with `--compile`" if "compile" in row["changes"] else ""
            words.append(f"{network} {row['images_per_second']:,.0f} in batches of {row['batch']}{more}")
    return ", ".join(words)


def hexagons() -> str:
    """CIFAR-10 on a hexagonal lattice."""
    rows = ["| group | parameters | error | images/s | s an epoch | change of the logits |", "|---|---|---|---|---|---|"]
    found = {group: over_seeds("2026-11-15_hexagons", f"hexagons_{group}") for group in ("p1", "p6", "p6m")}
    for group, r in found.items():
        assert r is not None
        rate, epoch = (statistics.mean(row[k] for row in r["seeds"]) for k in ("images_per_second", "median_epoch_seconds"))
        change = max(row["equivariance_error"] for row in r["seeds"])
        words = ("Z2 (p1)", "") if group == "p1" else (group, f"{change:.2g}")
        rows.append(f"| {words[0]} | {r['parameters']:,} | {error(r)} | {rate:,.0f} | {epoch:.1f} | {words[1]} |")
    r = found["p6m"]
    assert r is not None
    rows.append("")
    rows.append(
        f"Test error in percent, last of {r['config']['epochs']} epochs, no augmentation, recipes `hexagons/*` with the settings "
        f"of the square networks; bfloat16, {r['device']}. The last column is the largest relative change of the logits when "
        "the hexagonal image is turned: the strides are exact at this size, the head is not invariant. HexaConv's p6m ResNet26, "
        "with as many "
        "parameters, had 8.64. Records: "
        "`benchmarks/records/2026-11-15_hexagons`."
    )
    return "\n".join(rows)


def volumes() -> str:
    """ModelNet10, upright and turned."""
    rows = [
        "| group | parameters | upright | turned by O | lost by turning | turned at random | images/s | s an epoch |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for group in ("C1", "D4", "O", "Oh"):
        r = record(VOLUMES, f"volumes_{group}")
        errors = [error(r, key, few=1) for key in ("test_error", "turned_by_O", "turned_at_random")]
        # a loss is of one precision
        lost = [row["turned_by_O"] - row.get("upright_in_float32", row["test_error"]) for row in r["seeds"]]
        alone = max(r["seeds"], key=lambda row: row["images_per_second"])  # others shared the GPU
        words = ["C1 (planar)" if group == "C1" else group, f"{r['parameters']:,}", *errors[:2]]
        words += [f"{statistics.mean(lost):+.1f}, at most {max(lost):+.1f}", errors[2]]
        rows.append(f"| {' | '.join(words)} | {alone['images_per_second']:,.0f} | {alone['median_epoch_seconds']:.1f} |")
    broken, whole = (record(VOLUMES, name)["mean"] for name in ("killed", "unbroken"))
    rows.append("")
    rows.append(
        f"Test error in percent on the 908 volumes of ModelNet10: upright, each turned by a random element of O, each turned at "
        f"random about any axis; mean and standard deviation of {len(r['seeds'])} seeds, {r['config']['epochs']} epochs of "
        "upright volumes, settings not tuned. Answers of O and Oh to volumes turned by their elements change by less than "
        f"{10 ** math.ceil(math.log10(max(row.get('equivariance_error', 0) for row in r['seeds']))):.0e} in float32. "
        f"{r['device']}, bfloat16 (four of the Oh networks were tested on turned volumes in float32, and lost nothing by it "
        "against their float32 answers to upright ones); times are those of the seed that had the GPU most to itself. "
        "A run of C1 that was killed after some epochs and taken up "
        f"again ended with {broken:.2f} %, its unbroken twin with {whole:.2f} %. Records: `benchmarks/records/{VOLUMES}`."
    )
    return "\n".join(rows)


def speed() -> str:
    """Layers and networks beside the planar bound and the peers."""
    r = record(CPU, "speed")
    times: dict[tuple[str, str], dict[str, Any]] = {}
    for row in r["rows"]:
        times.setdefault((row["case"], row["mode"]), {})[row["candidate"]] = row
    names = ("gcnn", "gcnn, planar algorithm", "escnn", "e2cnn")
    rows = [
        "| forward and backward | bound, ms | " + " | ".join(names) + " | `planar()`, inference |",
        "|---|---|" + "---|" * (len(names) + 1),
    ]
    for (case, mode), found in times.items():
        if mode != "train":
            continue
        bound = min(found[k]["ms"] for k in ("planar nchw", "planar nhwc"))
        cells = [f"{found[k]['ratio']:.2f}" if k in found else "" for k in names]
        served = times.get((case, "inference"), {}).get("gcnn planar()")
        rows.append(
            f"| {case} | {bound:.1f} | {' | '.join(cells)} | {served['ratio']:.2f} |"
            if served
            else f"| {case} | {bound:.1f} | {' | '.join(cells)} | |"
        )
    compiled: dict[str, dict[str, float]] = {}
    for row in record(OLDER_CPU, "compiled")["rows"]:
        compiled.setdefault(row["case"], {})[row["candidate"]] = row["ms"]
    beside = ", ".join(f"{case} {ms['gcnn compiled'] / ms['planar compiled']:.2f}" for case, ms in compiled.items())
    older = {}
    for row in record(OLDER_CPU, "speed")["rows"]:
        if row["mode"] == "train":
            older[row["case"], row["candidate"]] = row["ms"], row["ratio"]
    gained = ", ".join(f"{case} {ratio:.2f}" for (case, name), (_, ratio) in older.items() if name == "gcnn" and ratio < 0.8)
    layers = ("p4 K=10 28px", "p4 K=32 28px", "p4m K=11 32px", "p4m K=23 16px")
    lost = [f"{case} {older[case, 'escnn'][0] / older[case, 'gcnn'][0]:.2f}" for case in layers]
    another: dict[str, dict[str, float]] = {}
    for row in record(OLDER_CPU, "speed_other_machine")["rows"]:
        if row["mode"] == "train" and row["case"] in layers:
            another.setdefault(row["candidate"], {})[row["case"]] = row["ms"]
    again = [f"{escnn / another['gcnn'][case]:.2f}" for case, escnn in another["escnn"].items()]
    built = {k: v for k, v in r["construction"].items() if "ResNet44" in k}
    words = ", ".join(f"{k.split(', ')[1]} {v:.2f} s" for k, v in built.items())
    rows.append("")
    rows.append(
        "Time as a multiple of the bound, float32, median of interleaved rounds; AMD EPYC (Zen 5), 2 threads, torch "
        f"{r['torch']}. Well below 1 is the Fourier algorithm, which needs fewer multiplications than a planar convolution of "
        "the same shape; a few percent to either side are noise. "
        f"Building the layers of a p4m ResNet44: {words}.\n\n"
        "How much channels last gain, which the peers do not use, depends on the machine: on an older one escnn took, as a "
        f"multiple of gcnn's time, {', '.join(lost)}, and on a third {', '.join(again)}. So does what the Fourier algorithm "
        f"gains: on the older one gcnn took {gained} of the bound, where matrix products are as fast as convolutions. Compiled "
        f"by torch.compile there, as a multiple of the planar twin compiled: {beside}. Records: `benchmarks/records/{CPU}` and "
        f"`{OLDER_CPU}`."
    )
    return "\n".join(rows)


def speed_on_gpu() -> str:
    """The same on a GPU, in three precisions."""
    runs = [record("2026-11-15_speed_h200", "speed"), *(record("2026-11-16_speed_h200", name) for name in ("layers", "speed"))]
    lifts, layers = record(SERVING, "lifts"), record(SERVING, "layers")
    layers["rows"] = [row for row in layers["rows"] if row["mode"] == "train"]
    rest = [record(FUSED, name) for name in ("algorithms", "octahedral")]
    eager = {"rows": [row for row in record(EAGER, "speed")["rows"] if row["how"] == "eager"]}  # peaks of memory in bf16
    loops = [record(LOOPS, name) for name in ("layers", "networks")]
    newest = [*(record(HOST, name) for name in ("eager", "p4cnn", "linear_float32")), record(POINTWISE, "speed")]
    cases = {row["case"] for r in [*runs, newest[0]] for row in r["rows"]}
    runs += [record(FUSED, "lifts"), lifts, layers, eager, *loops, {"rows": [row for r in rest for row in as_bench(r)]}, *newest]
    ratios: dict[str, dict[tuple[str, str], dict[str, Any]]] = {}
    for i, r in enumerate(runs):  # the later run of a case takes the place of an earlier one
        for row in r["rows"]:
            if row["case"] in cases:
                found = ratios.setdefault(row["case"], {}).setdefault((row["precision"], row["how"]), {})
                found[row["candidate"]] = {**row, "run": i}
    kinds = ("float32", "tf32", "bf16")
    rows = [
        "| forward and backward | bound, ms: float32, TF32, bf16 | gcnn: float32 | TF32 | bf16 | TF32, eager |",
        "|---|---|---|---|---|---|",
    ]
    for case, measured in sorted(ratios.items(), key=lambda each: each[0].startswith(("lift", "block", "P4CNN", "p4m ResNet"))):
        bounds = [min(measured[k, "graph"][c]["ms"] for c in ("planar nchw", "planar nhwc")) for k in kinds]
        ours = [measured[k, "graph"]["gcnn"] for k in kinds] + [measured["tf32", "eager"]["gcnn"]]
        cells = [f"{row['ratio']:.2f}{'' if row['run'] else '*'}" for row in ours]
        rows.append(f"| {case} | {', '.join(f'{b:.2f}' for b in bounds)} | {' | '.join(cells)} |")
    peaks = []
    for case in ("P4CNN", "p4m ResNet44", "p4m ResNet26"):
        taken = [ratios[case][k, "eager"] for k in ("tf32", "bf16")]
        beside = [t["gcnn"]["peak_bytes"] / min(t[c]["peak_bytes"] for c in ("planar nchw", "planar nhwc")) for t in taken]
        peaks.append(f"{case} {beside[0]:.2f} and {beside[1]:.2f}")
    memory = ", ".join(peaks)
    rows.append("")
    rows.append(
        f"Time as a multiple of the bound; {lifts['device']}, torch {lifts['torch']}. Steps are replayed as CUDA graphs, as "
        "`gcnn train` does, so that kernels are compared; the last column is steps launched from Python one after the other, "
        "on a host that is slow, where small layers wait for Python. There `auto` takes the [Fourier algorithm](fourier.md), "
        "with its many steps, for wide layers alone. "
        "What costs: masks on the hexagonal lattice of p6m; and in first layers, so in P4CNN too, the gradient of the filters, "
        "whose fastest kernels in cuDNN do not give the same bits in every run. A star: from an earlier run, before "
        "exact float32 products became twice as fast. Peak memory of a training step, against the planar network, with TF32 and "
        f"in bfloat16: {memory}. Records: `benchmarks/records/{FUSED}`, `{SERVING}`, `{EAGER}`, `{LOOPS}`, `{HOST}`, "
        f"`{POINTWISE}`, `2026-11-16_speed_h200` and `2026-11-15_speed_h200`."
    )
    return "\n".join(rows)


def as_bench(r: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Rows as `bench.py` writes them, of layers that take the Fourier algorithm by themselves."""
    for row in r["rows"]:
        times = {name: row[f"{name} train"] for name in ("planar nchw", "planar nhwc", "gcnn") if f"{name} train" in row}
        bound = min(ms for name, ms in times.items() if name != "gcnn")
        for name, ms in times.items() if row.get("pays", True) else ():
            yield {**{k: row[k] for k in ("case", "precision")}, "how": "graph", "candidate": name, "ms": ms, "ratio": ms / bound}


def serving() -> str:
    """How much faster plain modules answer than the networks they were made of."""
    folder, sizes = "2026-11-16_serving_cpu", (1, 8, 32)
    cells: dict[str, list[str]] = {}
    for size in sizes:
        r = record(folder, f"batch{size}")
        times = {(row["case"], row["candidate"]): row["ms"] for row in r["rows"]}
        for case in {row["case"]: None for row in r["rows"]}:
            cells.setdefault(case, []).append(f"{times[case, 'gcnn'] / times[case, 'gcnn planar()']:.2f}")
    newer: dict[str, list[str]] = {}
    for size in sizes:
        times = {(row["case"], row["candidate"]): row["ms"] for row in record(CPU, f"serving_batch{size}")["rows"]}
        for case in cells:
            newer.setdefault(case, []).append(f"{times[case, 'gcnn'] / times[case, 'gcnn planar()']:.2f}")
    there = "; ".join(f"{case} {', '.join(found)}" for case, found in newer.items())
    gpu = record(SERVING, "serving")
    names = ("case", "batch", "precision", "how", "candidate")
    ratios = {tuple(row[k] for k in names): row["ratio"] for row in gpu["rows"]}
    settings = [(size, kind) for size in (1, 32) for kind in ("tf32", "bf16")]
    for case, found in cells.items():
        for size, kind in settings:
            gains = [ratios[case, size, kind, how, "gcnn"] / ratios[case, size, kind, how, "gcnn planar()"] for how in HOW]
            found.append(", ".join(f"{gain:.2f}" for gain in gains))
    heads = [f"CPU, batches of {size}" for size in sizes]
    heads += [f"H200, {'TF32' if kind == 'tf32' else kind}, batches of {size}" for size, kind in settings]
    rows = ["| network | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
    rows += [f"| {case} | {' | '.join(found)} |" for case, found in cells.items()]
    rows.append("")
    rows.append(
        f"Times the speed of the network as it is, in eval mode. {r['device']}, float32, torch {r['torch']}; {gpu['device']}, "
        f"torch {gpu['torch']}, replayed as CUDA graphs, and launched from Python on a slow host. On a newer CPU (AMD EPYC, "
        f"Zen 5), batches of 1, 8 and 32: {there}. Records: "
        f"`benchmarks/records/{folder}`, `{CPU}` and `{SERVING}`."
    )
    return "\n".join(rows)


def savings() -> str:
    """What the Fourier algorithm saves, for every group."""
    rows = [
        "| group | elements | dimensions of its representations | multiplications: planar, Fourier | fewer |",
        "|---|---|---|---|---|",
    ]
    words = {1: "", 2: " (complex)", 4: " (quaternionic)"}
    for group in GROUPS.values():
        if group.order > 1:
            dims = ", ".join(f"{rho.dim}{words[rho.kind]}" for rho in irreps(group))
            planar, fourier = group.order**2, multiplications(group)
            rows.append(f"| {group.name} | {group.order} | {dims} | {planar}, {fourier} | {planar / fourier:.2f}x |")
    return "\n".join(rows)


def fourier_gains() -> dict[tuple[str, str], tuple[float, float, str]]:
    """The speed of the Fourier algorithm on an H200 as a multiple of the bound, by layer and precision.

    Forward, forward with backward, and a mark for what the table's note says of it.
    """
    folder = "2026-11-15_fourier_h200"
    blocks = record(folder, "blocks")["rows"]
    later = {(row["case"], row["precision"]): row["forward_ms_train_ms_by_megabytes"]["as built"] for row in blocks}
    newer = [("2026-11-16_fourier_h200", "algorithms"), *((FUSED, name) for name in ("algorithms", "half_maps", "octahedral"))]
    again = {(row["case"], row["precision"]): row for place in newer for row in record(*place)["rows"]}
    later = {key: times for key, times in later.items() if key not in again}
    found = {}
    for key, row in ({(row["case"], row["precision"]): row for row in record(folder, "algorithms")["rows"]} | again).items():
        forward, train = later.get(key, [row["gcnn forward"], row["gcnn train"]])
        bounds = [min(row.get(f"planar {way} {mode}", math.inf) for way in ("nchw", "nhwc")) for mode in ("forward", "train")]
        found[key] = bounds[0] / forward, bounds[1] / train, "*" if key in later else ""
    both: dict[tuple[str, str], dict[str, float]] = {}
    for place in ((HOST, "linear_float32"), (POINTWISE, "speed")):
        for row in record(*place)["rows"]:
            if row["candidate"] == "gcnn":
                both.setdefault((row["case"], row["precision"]), {})[row["mode"]] = 1 / row["ratio"]
    return found | {key: (row["forward"], row["train"], "") for key, row in both.items()}


def fourier() -> str:
    """What the Fourier algorithm gains over the planar bound, by the number of channels."""
    folder, cpu = "2026-11-15_fourier_h200", record(CPU, "speed")
    found: dict[str, dict[str, str]] = {}
    for (case, kind), (forward, train, mark) in fourier_gains().items():
        found.setdefault(case, {})[kind] = f"{forward:.2f}, {train:.2f}{mark}"
    for row in record("2026-11-16_speed_h200", "layers")["rows"]:
        if (row["case"], row["how"], row["candidate"]) == ("Oh K=8 16px", "graph", "gcnn"):
            found["Oh K=8 16px"] = {row["precision"]: f"-, {1 / row['ratio']:.2f}"}
    for row in cpu["rows"]:
        if row["candidate"] == "gcnn" and row["mode"] == "train" and row["case"] in found:
            found[row["case"]]["cpu"] = f"{1 / row['ratio']:.2f}"
    from_float32 = []
    for row in record(FUSED, "algorithms")["rows"]:
        if row["precision"] == "bf16" and row["case"] in ("p4m K=64 16px", "p4m K=128 16px", "p4m K=256 16px"):
            gains = [row[f"planar nhwc {mode}"] / row[f"gcnn {mode}"] for mode in ("forward", "train")]
            from_float32.append(f"{row['case']} {gains[0]:.2f}, {gains[1]:.2f}")
    kinds = ("float32", "tf32", "bf16", "cpu")
    rows = [
        "| layer | H200, float32: forward, with backward | TF32 | bf16 | CPU, float32, with backward |",
        "|---|---|---|---|---|",
    ]
    rows += [f"| {case} | {' | '.join(cells.get(k, '') for k in kinds)} |" for case, cells in found.items()]
    rows.append("")
    rows.append(
        'Times the speed of the planar bound. On the H200 with `algorithm="fourier"`: where a number is well below 1, "auto" '
        'takes the planar algorithm; on the CPU with "auto". Steps are CUDA graphs; those with a star were measured in a later '
        "run than their bound, with better choices for the gradient of the filters. TF32 and bf16 of p4m with K = 32, 64, 96, "
        "100, 128 and 256 and of p4 with K = 64 and 128 were measured last, when the way back had one copy of the map less; "
        "bf16 there begins with a map of bf16, but for K = 50, 100 and for 32px; with a map of float32, which both sides round "
        f"first, as the older rows have it, it was: {'; '.join(from_float32)}. Records: `benchmarks/records/{folder}`, "
        f"`2026-11-16_fourier_h200`, `{FUSED}`, `{HOST}`, `{POINTWISE}`, `2026-11-16_speed_h200` and `{CPU}`."
    )
    return "\n".join(rows)


def curve() -> str:
    """The picture of `fourier_gains` over the number of channels, for 3x3 layers of p4m: lines for maps of 16 pixels."""
    lines = {"float32": "#d8344a", "tf32": "#3f7fd8", "bf16": "#2f9e62"}
    left, wide, high, top = 45, 300, 260, 30
    width, height = 2 * (left + wide) + 20, high + 80
    parts = [f'<rect width="{width}" height="{height}" fill="#fff"/>']

    def place(k: float, gain: float, panel: int) -> tuple[float, float]:
        across, up = math.log(k / 9, 32), math.log(gain / 0.11, 128)
        return left + panel * (wide + left) + across * wide, top + (1 - up) * high

    for panel, title in enumerate(("forward", "forward and backward")):
        begin, end = place(9, 1, panel)[0], place(288, 1, panel)[0]
        parts.append(f'<text x="{(begin + end) / 2:.0f}" y="18">{title}</text>')
        for tick in (0.125, 0.25, 0.5, 1, 2, 4, 8):
            y, stroke = place(9, tick, panel)[1], 'stroke="#222" stroke-dasharray="5 3"' if tick == 1 else 'stroke="#ddd"'
            parts.append(f'<path d="M{begin:.0f} {y:.1f}H{end:.0f}" {stroke}/>')
            parts.append(f'<text x="{begin - 20:.0f}" y="{y + 4:.1f}">{tick:g}</text>')
        for k in (11, 23, 32, 64, 128, 256):
            parts.append(f'<text x="{place(k, 1, panel)[0]:.0f}" y="{top + high + 18}">{k}</text>')
        for (case, kind), gain in fourier_gains().items():
            found = re.fullmatch(r"p4m K=(\d+) (\d+)px", case)
            if found and found[2] != "16":
                x, y = place(int(found[1]), gain[panel], panel)
                parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="#fff" stroke="{lines[kind]}" stroke-width="2"/>')
        for kind, color in lines.items():
            known = {k: fourier_gains().get((f"p4m K={k} 16px", kind)) for k in (23, 32, 50, 64, 96, 128, 256)}
            points = [place(k, gain[panel], panel) for k, gain in known.items() if gain]
            path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
            parts.append(f'<path d="M{path}" fill="none" stroke="{color}" stroke-width="2"/>')
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{color}"/>' for x, y in points]
    for row, (kind, color) in enumerate(lines.items()):
        parts.append(f'<text x="{left + 45}" y="{top + 22 + 17 * row}" style="fill:{color}">{kind.replace("tf", "TF")}</text>')
    words = "channels K of a 3x3 layer of p4m; filled: maps of 16 pixels, hollow: of 8 and 32"
    parts.append(f'<text x="{width // 2}" y="{height - 12}">{words}</text>')
    style = "<style>text{font:13px Georgia,serif;fill:#222;text-anchor:middle}</style>"
    title = "<title>Speed of the Fourier algorithm on an H200 as a multiple of the planar bound, over the channels</title>"
    box = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {box} role="img">{title}{style}\n' + "\n".join(parts) + "</svg>\n"


TABLES = {
    "rotated_mnist": rotated_mnist,
    "summary": summary,
    "cifar10": cifar10,
    "hexagons": hexagons,
    "volumes": volumes,
    "speed": speed,
    "speed_on_gpu": speed_on_gpu,
    "serving": serving,
    "savings": savings,
    "fourier": fourier,
}
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def filled(path: Path) -> str:
    """A page with what stands between the markers of each table made anew; README.md has the first words about it."""
    text = path.read_text()
    for name, table in TABLES.items():
        start, end = f"<!-- table {name} -->\n", f"<!-- end {name} -->"
        if start in text:
            before, rest = text.split(start)
            made = table()
            if path.parent == ROOT:
                page = next((p for p in PAGES if p != path and start in p.read_text()), None)
                more = f" [More about these numbers](docs/{page.name})." if page else ""
                made = "\n\n".join(made.split("\n\n")[:2]) + more
            text = before + start + made + "\n" + end + rest.split(end)[1]
    return text


def main() -> None:
    """Writes, or checks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    made = {path: filled(path) for path in PAGES} | {ROOT / "docs" / "fourier.svg": curve()}
    for path, text in made.items():
        if not check:
            path.write_text(text)
        elif not path.is_file() or path.read_text() != text:
            raise SystemExit(f"{path.name} has other numbers than the records: run python benchmarks/tables.py")


if __name__ == "__main__":
    main()
