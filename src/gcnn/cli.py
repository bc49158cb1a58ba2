"""The command line, thin calls of the library: gcnn train, eval, predict, report, check, export, demo, explore ..."""

from __future__ import annotations

import argparse
import csv
import dataclasses
import io
import json
import os
import shlex
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from gcnn import __version__
from gcnn.checks import unknown
from gcnn.data import KINDS, SOURCES, Dataset, download, load, pictures_in, read_picture, shown
from gcnn.files import write_file
from gcnn.formats import resized
from gcnn.groups import GROUPS
from gcnn.models import ALIASES, EXAMPLES, build
from gcnn.recipes import RECIPES
from gcnn.runs import (
    Normalised,
    Run,
    evaluate,
    group_of,
    load_run,
    multiplications,
    names_the_root,
    on_lattice,
    pick_device,
    precision,
    read_checkpoint,
    read_config,
)
from gcnn.train import Config, train

if sys.version_info >= (3, 11):
    import tomllib
else:  # Python 3.10
    tomllib = None

__all__ = ["main"]

PROBLEMS = (ValueError, TypeError, OSError, ImportError, RuntimeError)


def main(arguments: list[str] | None = None) -> int:
    """Runs one command; the exit status is 0, 1 for a problem that is explained, 130 for Ctrl-C.

    >>> main(["groups"])  # doctest: +ELLIPSIS
    line   dimension 1, line      lattice,  1 elements,  1 subgroups
    ...
    0
    """
    parser = argparse.ArgumentParser(prog="gcnn", description="Group equivariant networks: train, test, look.")
    parser.add_argument("--version", action="version", version=f"gcnn {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    command = commands.add_parser("train", help="train a network; `gcnn train --help` lists every setting", add_help=False)
    command.set_defaults(run=_train)
    command = commands.add_parser("eval", help="test a run again")
    command.add_argument("folder", help="the folder of a run")
    command.add_argument("--data-root", default="", help="the folder of its data set, if it has moved")
    command.add_argument(
        "--test", action="store_true", help="on the test set, also for a run that held out images (--validation)"
    )
    command.set_defaults(run=_eval)
    command = commands.add_parser("predict", help="classify image files")
    command.add_argument("folder", help="the folder of a run")
    command.add_argument("images", nargs="+", help="image files of the size that the network was trained on, or folders of them")
    command.add_argument("--top", type=_positive, default=3, help="how many classes to print for each")
    command.add_argument("--invert", action="store_true", help="turn dark into light first: for dark digits on a light ground")
    command.add_argument(
        "--csv", default="", metavar="FILE", help="also write a table: file, class, the probability of every class"
    )
    command.add_argument("--force", action="store_true", help="replace a table that is there already")
    command.set_defaults(run=_predict)
    command = commands.add_parser("report", help="write one HTML page about runs")
    command.add_argument("folders", nargs="+", help="the folders of runs, the one to show in detail first")
    command.add_argument("--out", default="report.html", help="the page; report.html in this folder if not given")
    command.add_argument("--data-root", default="", help="the folder of the data set, if it has moved")
    command.set_defaults(run=_report)
    command = commands.add_parser("check", help="is the network of a run equivariant? one row per layer; exit status 1 if not")
    command.add_argument("folder", help="the folder of a run")
    command.add_argument("--group", default="", help="another group to ask about")
    command.set_defaults(run=_check)
    command = commands.add_parser("demo", help="P4CNN against Z2CNN on the digits that come with the package, in minutes")
    command.add_argument("--out", default="out/demo", help="where the runs and pictures go")
    command.set_defaults(run=_demo)
    command = commands.add_parser("explore", help="draw a digit, turn it, watch networks and feature maps: a page in the browser")
    command.add_argument("folders", nargs="*", help="folders of runs to compare; P4CNN and Z2CNN of the package if not given")
    command.add_argument("--host", default="127.0.0.1", help="the address to listen on; 127.0.0.1 is this machine alone")
    command.add_argument("--port", type=int, default=0, help="the port, a free one if not given")
    command.add_argument("--no-browser", action="store_true", help="print the address only")
    command.set_defaults(run=_explore)
    command = commands.add_parser("download", help="get the files of a data set, checked by their checksums")
    command.add_argument(
        "name", choices=sorted([*SOURCES, "rotated_mnist"]), help="the data set; rotated_mnist is made from mnist"
    )
    command.add_argument("--root", default="", help="the folder for them, data/NAME if not given")
    command.set_defaults(run=_download)
    command = commands.add_parser("export", help="write the network of a run as an ONNX file, checked with onnxruntime")
    command.add_argument("folder", help="the folder of a run")
    command.add_argument("--onnx", required=True, metavar="FILE", help="the file; it takes images with numbers from 0 to 255")
    command.add_argument("--force", action="store_true", help="replace a file that is there already")
    command.set_defaults(run=_export)
    command = commands.add_parser("models", help="list the networks, with their parameters and cost")
    command.set_defaults(run=_models)
    command = commands.add_parser("groups", help="list the groups")
    command.set_defaults(run=_groups)
    command = commands.add_parser("plot", help="draw a function on a plane group and the same under one of its elements")
    command.add_argument("group", help="a plane group: p4, p4m, p6m ...")
    command.add_argument("--element", type=int, default=1, help="the element that acts")
    command.add_argument("--out", default="", help="the picture, GROUP.png if not given")
    command.add_argument("--force", action="store_true", help="replace a picture that is there already")
    command.set_defaults(run=_plot)
    for name in ("eval", "predict", "report", "check"):
        commands.choices[name].add_argument("--device", default="auto", help="auto (cuda, mps or cpu), or a device of torch")
    words = sys.argv[1:] if arguments is None else arguments
    chosen, rest = parser.parse_known_args(words)
    if rest and chosen.command != "train":
        command = commands.choices[chosen.command]
        if foreign := [word.partition("=")[0] for word in rest if word.startswith("--") and word != "--"]:
            command.error(unknown("option", foreign[0], (o for o in command._option_string_actions if o.startswith("--"))))
        command.error(f"unrecognized arguments: {' '.join(rest)}")
    chosen.rest = rest
    try:
        with precision(tf32=False):  # training sets its own
            return chosen.run(chosen) or 0
    except BrokenPipeError:  # whoever read our output has seen enough
        _say_no_more()
        return 0
    except PROBLEMS as error:
        print(f"gcnn {chosen.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as stopped:
        print(f"\ngcnn {chosen.command}: stopped{stopped}", file=sys.stderr)
        return 130


def _say_no_more() -> None:
    """Redirects stdout to nowhere: else Python would fail at its end, flushing a closed pipe."""
    with suppress(OSError, ValueError):  # an output that is no file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number, at least 1, got {text!r}")
    return int(text)


@dataclasses.dataclass(frozen=True)
class _TrainArguments:
    """Trains a network and writes the run to a folder. Settings come from a recipe, then a file, then the command line."""

    settings: Config
    out: str = ""
    """The folder of the run: config, metrics, checkpoint. Empty: runs/MODEL, or runs/MODEL-GROUP."""
    resume: bool = False
    """Go on with the run in that folder, with its settings."""
    recipe: str = ""
    """Start from a named recipe; see the list above."""
    config: str = ""
    """Start from a file with settings by name: TOML, or the config.json of a run."""


def _name(model: str, group: str) -> str:
    return f"{model}-{group}" if group else model


def _train(chosen: argparse.Namespace) -> None:
    try:
        import tyro
    except ImportError as error:
        raise ImportError('the command line needs tyro, which is not installed: pip install "gcnn[train]"') from error
    sources = argparse.ArgumentParser(add_help=False)
    sources.add_argument("--recipe", default="")
    sources.add_argument("--config", default="")
    sources.add_argument("--out", default="")
    sources.add_argument("--model", default=Config.model)
    sources.add_argument("--group", default="")
    sources.add_argument("--resume", action="store_true")
    first = sources.parse_known_args(chosen.rest)[0]
    if first.resume and not (first.recipe or first.config):
        base = read_config(first.out or f"runs/{_name(ALIASES.get(first.model, first.model), first.group)}")
    else:
        base = _base(first.recipe, first.config)
    asked = tyro.cli(
        _TrainArguments,
        prog="gcnn train",
        description=f"{_TrainArguments.__doc__}\n\nRecipes: {', '.join(RECIPES)}.",
        default=_TrainArguments(base, recipe=first.recipe, config=first.config),
        args=chosen.rest,
        config=(tyro.conf.OmitArgPrefixes,),
    )
    settings = asked.settings
    name = _name(settings.model, settings.group)
    folder = Path(asked.out or f"runs/{name}")
    first_rank = int(os.environ.get("RANK", "0")) == 0
    before = len(read_checkpoint(folder / "last.safetensors")[1]["history"]) if asked.resume else 0
    try:
        done = train(settings, folder, asked.resume)
    except KeyboardInterrupt:
        saved = (folder / "last.safetensors").exists()
        way = f"; go on with gcnn train --resume --out {shlex.quote(str(folder))}"
        way = way if saved else " in the first epoch, before anything was saved; start again with the same command"
        raise KeyboardInterrupt(way) from None
    if dist.is_initialized():
        dist.destroy_process_group()
    if not first_rank:
        return
    last = done.history[-1]
    if last["epoch"] == before:
        epochs = f"{before} epoch{'s' if before > 1 else ''}"
        print(f"the run had its {epochs} already; a larger --epochs goes on, if its learning rate is constant")
    kind = "validation" if settings.validation else "test"
    which = f" with the weights of epoch {done.kept['epoch']}" if done.kept else ""
    found = done.tested.get("test_error")
    told = "not tested yet" if found is None else f"{kind} error {found:.2f} %"
    epochs = f"{last['epoch']} epoch{'s' if last['epoch'] > 1 else ''}"
    print(f"{name}: {told} after {epochs}{which}; the run is in {folder}")


def _base(recipe: str, file: str) -> Config:
    if recipe and recipe not in RECIPES:
        raise ValueError(unknown("recipe", recipe, RECIPES))
    config = RECIPES[recipe] if recipe else Config()
    if file:
        json_file = Path(file).suffix == ".json"  # as runs have it
        if tomllib is None and not json_file:
            raise ValueError("--config reads TOML with Python 3.11 or newer; give the settings as options, or as JSON")
        try:
            read: Any = json.loads if json_file else tomllib.loads
            text = Path(file).read_text(encoding="utf-8-sig")  # some editors begin files with a mark
            settings = {k.replace("-", "_"): v for k, v in read(text).items()}
        except OSError as error:
            raise type(error)(f"--config {file} cannot be read ({error.strerror or error}); name a file of settings") from error
        except (ValueError, AttributeError) as error:
            raise ValueError(f"{file}: expected settings in {'JSON' if json_file else 'TOML'}: {error}") from error
        known = {f.name for f in dataclasses.fields(Config)}
        if foreign := sorted(set(settings) - known):
            raise ValueError(f"{file}: unknown settings {', '.join(foreign)}; known are {', '.join(sorted(known))}")
        try:
            config = dataclasses.replace(config, **settings)
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from error
    return config


def _data(run: Run, root: str = "") -> Dataset:
    with names_the_root():
        data = load(run.config.data, root or run.config.data_root or None, run.config.size)
    run.check_data(data)
    return data


def _eval(chosen: argparse.Namespace) -> None:
    device = pick_device(chosen.device)
    run = load_run(chosen.folder, str(device))
    data = _data(run, chosen.data_root)
    data = data if chosen.test else run.held_out(data)
    found = evaluate(run.model, run.inputs(data.test, device), run.config.test_turns)
    name = _name(run.config.model, run.config.group)
    print(f"{name} on {len(data.test)} images of {data.name}: error {found['error']:.2f} %, loss {found['loss']:.4f}")
    _print_classes(run.classes, found["confusion"])


def _print_classes(classes: tuple[str, ...], confusion: list[list[int]]) -> None:
    """One line per class: how many of its images were recognised, and what the others were taken for."""
    wide, recalls = max(len(name) for name in (*classes, "class")), []
    print(f"{'class':{wide}}  images   recall  taken for")
    for i, (name, row) in enumerate(zip(classes, confusion, strict=True)):
        if not sum(row):
            continue
        recalls.append(100 * row[i] / sum(row))
        others = sorted((j for j, n in enumerate(row) if n and j != i), key=lambda j: -row[j])
        print(
            f"{name:{wide}}{sum(row):8,}{recalls[-1]:7.2f} %  {', '.join(f'{classes[j]} {row[j]}' for j in others[:4])}".rstrip()
        )
    print(f"mean of the recalls (balanced accuracy): {sum(recalls) / len(recalls):.2f} %")


def _predict(chosen: argparse.Namespace) -> int:
    if chosen.csv:
        _check_new(chosen.csv, "answers.csv", chosen.force)
    swapped = [given for given in chosen.images if (Path(given) / "last.safetensors").is_file()]
    if swapped and not (Path(chosen.folder) / "last.safetensors").is_file():
        words = " ".join(shlex.quote(word) for word in (swapped[0], chosen.folder))
        raise ValueError(f"{swapped[0]} is a run, {chosen.folder} is none; the run comes first: gcnn predict {words}")
    run = load_run(chosen.folder, chosen.device)
    status, unheard, rows = 0, None, [["file", "class", *run.classes]]
    for name in [name for given in chosen.images for name in _files(given)]:
        try:
            pixels = _pixels(name, run.shape, run.config.size)
        except (OSError, ValueError) as error:  # the others may still be good
            words = str(error) if name in str(error) else f"{name}: {error}"
            print(f"gcnn predict: {words}", file=sys.stderr)
            status = 1
            continue
        if chosen.invert:
            pixels = 255 - pixels
        elif run.mean < 100 and float(pixels.float().median()) > 155:
            print(f"gcnn predict: {name} has a light ground, the network learned from dark ones: --invert?", file=sys.stderr)
        if float(pixels.max()) < run.mean:
            print(
                f"gcnn predict: {name} is all darker than the mean of what the network learned from: scaled alike?",
                file=sys.stderr,
            )
        shares = run.predict(pixels[None])[0]
        best = shares.argsort(descending=True)[: chosen.top].tolist()
        try:
            if unheard is None:
                print(f"{name}: " + ", ".join(f"{run.classes[i]} {100 * float(shares[i]):.1f} %" for i in best), flush=True)
        except (OSError, UnicodeError) as error:  # whoever read our output has seen enough, say; the table is to have all
            if not chosen.csv:
                raise
            unheard = error
        rows.append([name, run.classes[best[0]], *(f"{share:.6g}" for share in shares.tolist())])
    if chosen.csv:
        table = io.StringIO()
        csv.writer(table).writerows(rows)
        write_file(Path(chosen.csv), table.getvalue().encode(errors="surrogateescape"))
    if isinstance(unheard, BrokenPipeError):
        _say_no_more()
    elif unheard is not None:
        raise unheard
    return status


def _files(name: str) -> list[str]:
    """The pictures in a folder, or in its subfolders if it holds only those; any other name as it is."""
    if not Path(name).is_dir():
        return [name]
    found, inside = pictures_in(Path(name)), shown(Path(name))
    deeper = [path for path in inside if path.is_dir()]
    if not found and all(path.is_dir() for path in inside):
        parts = inside
        found, inside = [path for part in parts for path in pictures_in(part)], [path for part in parts for path in shown(part)]
    taken = set(found)
    if found and (others := [path for path in inside if path not in taken]):
        more = f"{len(others)} others in {name} were passed over, {others[0]} for example; pictures are {', '.join(KINDS)}"
        print(f"gcnn predict: {more}", file=sys.stderr)
    if not found and any(pictures_in(part) for folder in deeper for part in shown(folder) if part.is_dir()):
        raise ValueError(f"{name} holds folders of folders of pictures; give one of those, {deeper[-1]} for example")
    return [str(path) for path in found] or [name]


def _check_new(name: str, example: str, force: bool) -> None:
    """Raises an OSError for a file that cannot be written, or is there already and may not be replaced."""
    if Path(name).is_dir():
        raise IsADirectoryError(f"{name} is a folder; give the name of a file, {name}/{example}")
    if Path(name).exists() and not Path(name).is_file():
        raise FileExistsError(f"{name} is no file that can be replaced; give the name of a file, {example}")
    if not Path(name).parent.is_dir():
        raise FileNotFoundError(f"there is no folder {Path(name).parent} for {name}; make it first")
    if Path(name).exists() and not force:
        raise FileExistsError(f"{name} is there already; choose another name, or --force")


def _pixels(name: str, shape: tuple[int, ...], size: int) -> torch.Tensor:
    """An image file as bytes of `shape`, resized if the run resized its own to `size`."""
    from PIL import Image

    if len(shape) != 3:
        raise ValueError(f"{name}: the network takes volumes {shape}, not images; use Run.predict of gcnn.train.load_run")
    channels, rows, columns = shape
    if channels not in (1, 3):
        raise ValueError(
            f"{name}: the network takes images of {channels} bands, and files are read as gray or RGB; in Python "
            "gcnn.train.load_run(folder).predict(images) takes them"
        )
    if Path(name).is_dir():
        raise ValueError(f"{name} is a folder without pictures; they are {', '.join(KINDS)}")
    read = read_picture(name)
    read = resized(read, size, name) if size else read
    if read.shape[:2] != (rows, columns):
        raise ValueError(f"{name} has {read.shape[1]} x {read.shape[0]} pixels, the network takes {columns} x {rows}; resize it")
    pixels = torch.from_numpy(np.array(Image.fromarray(read).convert("L" if channels == 1 else "RGB")))
    return pixels[None] if channels == 1 else pixels.permute(2, 0, 1)


def _report(chosen: argparse.Namespace) -> None:
    from gcnn.report import report

    report(chosen.folders, chosen.out, root=chosen.data_root, device=chosen.device, progress=True)
    print(chosen.out)


def _check(chosen: argparse.Namespace) -> int:
    from gcnn.testing import explain

    run = load_run(chosen.folder, chosen.device)
    own = group_of(run.model)
    if chosen.group and chosen.group not in GROUPS:
        raise ValueError(unknown("group", chosen.group, GROUPS))
    group = GROUPS[chosen.group] if chosen.group else own
    if group.dim != own.dim or (not group.fills_box and own.fills_box):
        raise ValueError(f"{group} acts on another lattice than {own}, the group of the run; ask about one that acts on the same")
    torch.manual_seed(0)
    model, x = on_lattice(run.model, torch.rand(2, *run.shape, device=next(run.model.parameters()).device))
    found = explain(model, x, group)
    print(found)
    if group.order == 1:
        print(f"{group.name} has no turns, so there was nothing to lose; ask about another group with --group p4")
    return 0 if found.exact else 1


def _demo(chosen: argparse.Namespace) -> None:
    from gcnn.demo import demo

    demo(Path(chosen.out))


def _explore(chosen: argparse.Namespace) -> None:
    from gcnn.explore import serve

    serve(chosen.folders, chosen.host, chosen.port, browser=not chosen.no_browser)


def _download(chosen: argparse.Namespace) -> None:
    root = chosen.root or f"data/{chosen.name}"
    download(chosen.name, root)
    print(f"{chosen.name} is in {root}: gcnn train --data {chosen.name} --data-root {root}")


def _export(chosen: argparse.Namespace) -> None:
    from gcnn.export import to_onnx

    _check_new(chosen.onnx, "net.onnx", chosen.force)
    if Path(chosen.onnx).suffix != ".onnx":  # the run's own files are not to be replaced
        raise ValueError(f"--onnx {chosen.onnx}: expected a name that ends in .onnx, such as net.onnx")
    run = load_run(chosen.folder)
    run.check_takes_bytes()
    example = torch.randint(0, 256, (2, *run.shape)).float()
    about = {"classes": json.dumps(run.classes), "model": run.config.model, "group": group_of(run.model).name}
    about |= {"input": f"{tuple(run.shape)}, numbers from 0 to 255", "output": "logits; their softmax is the probabilities"}
    error = to_onnx(Normalised(run.model, run.mean, run.std), chosen.onnx, example, overwrite=chosen.force, about=about)
    names = ", ".join(run.classes[:10]) + (" ..." if len(run.classes) > 10 else "")
    print(
        f"{chosen.onnx}: images {tuple(run.shape)} with numbers from 0 to 255 to {len(run.classes)} logits, in the order {names} "
        f"(also in the file's metadata); off by {error:.1e} in onnxruntime"
    )
    if run.config.test_turns > 1:
        print(
            f"note: the file answers to the image as it is; gcnn predict and the tests of this run take the mean of "
            f"{run.config.test_turns} turns of it (test_turns), so that their answers differ"
        )


def _models(chosen: argparse.Namespace) -> None:
    print(f"{'name':16}{'group':8}{'parameters':>12}{'image':>18}{'multiplications':>17}")
    for name, shape in EXAMPLES.items():
        with torch.device("meta"):
            model = build(name)
            image = torch.empty(1, *shape)
        cost = multiplications(model, image) / 1e6
        count = sum(p.numel() for p in model.parameters())
        sides = " x ".join(str(n) for n in shape)
        print(f"{name:16}{group_of(model).name:8}{count:>12,}{sides:>18}{cost:>15,.0f} M")
    print('\nbuild("NAME", group=..., num_classes=..., in_channels=...) in Python; the cost is that of one image of that size.')
    print("At these sizes strides are exact; whether they are at others, gcnn.testing.explain tells.")


def _groups(chosen: argparse.Namespace) -> None:
    for group in GROUPS.values():
        unit = sum(map(sum, group.metric)) == group.dim
        lattice = ("line", "square", "cubic")[group.dim - 1] if unit else "hexagonal"
        subgroups = len(group.subgroups())
        print(f"{group.name:6} dimension {group.dim}, {lattice:9} lattice, {group.order:2} elements, {subgroups:2} subgroups")


def _plot(chosen: argparse.Namespace) -> None:
    from gcnn import plot

    if chosen.group not in GROUPS or GROUPS[chosen.group].dim != 2:
        raise ValueError(unknown("group", chosen.group, (name for name, group in GROUPS.items() if group.dim == 2)))
    group = GROUPS[chosen.group]
    path, content = Path(chosen.out or f"{group.name}.png"), io.BytesIO()
    path.parent.mkdir(parents=True, exist_ok=True)
    _check_new(str(path), f"{group.name}.png", chosen.force)
    figure = plot.action(group, plot.example(group), chosen.element if group.order > 1 else 0)
    figure.savefig(content, format=path.suffix[1:] or None)
    write_file(path, content.getvalue())
    print(path)
