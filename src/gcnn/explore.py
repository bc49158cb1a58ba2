"""`gcnn explore`: a page in the browser on which one draws a digit, turns it, and sees what networks and feature maps do.

`Explorer` answers with plain dictionaries and knows nothing of the web; `serve` puts it behind a server for this machine, and
assets/explore.html is the page, whole, so that nothing comes from elsewhere. Needs pip install "gcnn[explore]".
"""

from __future__ import annotations

import json
import math
import socket
import webbrowser
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gcnn import plot
from gcnn.config import Config
from gcnn.data import Split, digits
from gcnn.functional import act, gcorr
from gcnn.groups import GROUPS, Group
from gcnn.lattice import ROW, to_hexagonal
from gcnn.models import PRETRAINED
from gcnn.models.weights import load_into, read
from gcnn.nn import LiftConv
from gcnn.runs import Run, answers_of, group_of, load_run, make_model
from gcnn.steps import turned

__all__ = ["Explorer"]

ANGLES = 72  # steps of five degrees, so that quarter, sixth and third turns are among them
TURNS = 24  # steps of fifteen degrees, for the errors over many digits
TRIED = 300  # test digits, looked through for those that a turn makes a network read otherwise
BYTES = 64_000  # a request holds the numbers of one image, 784 mostly: what is longer is none of ours
MISSING = 'gcnn explore needs starlette and uvicorn, which are not installed: pip install "gcnn[explore]"'
PLANE_GROUPS = {name: group for name, group in GROUPS.items() if group.dim == 2}


class Explorer:
    """What the page asks for: answers of networks and feature maps of one image, turned and mirrored.

    Without folders of runs, P4CNN and Z2CNN with the weights that come with the package.

    >>> look = Explorer().look({"pixels": [0] * 784, "angle": 90, "mirror": False, "group": "p4", "channel": 0})
    >>> [network["name"] for network in look["networks"]], look["map"]["element"]
    (['P4CNN', 'Z2CNN'], 1)
    """

    def __init__(self, folders: Sequence[str | Path] = ()) -> None:
        self.runs = {Path(f).resolve().name: load_run(f) for f in folders} or {k.upper(): _pretrained(k) for k in PRETRAINED}
        if len(self.runs) < len(folders):
            raise ValueError(f"explore: the folders must have different names, got {', '.join(map(str, folders))}")
        self.shape = next(iter(self.runs.values())).shape
        for name, run in self.runs.items():
            if run.shape != self.shape or len(run.shape) != 3 or run.shape[0] != 1 or run.shape[1] != run.shape[2]:
                raise ValueError(f"explore: expected runs on gray square images of one size, got {run.shape} for {name}")
        data = digits()
        self.test = data.test if self.shape[-1] == 28 else data.test[:0]
        self._readers = [name for name, run in self.runs.items() if run.classes == data.classes and len(self.test)]
        self._errors: dict[tuple[str, int], float] = {}

    def about(self) -> dict[str, Any]:
        """What does not change: the networks, the plane groups with their diagrams, examples to begin with."""
        test = self.test
        chosen = [i for label in range(10) for i in (test.labels == label).nonzero()[:3, 0].tolist()]  # the first three of each
        unsteady = self._unsteady(test.images[:TRIED].float())
        examples = [
            {"label": int(test.labels[i]), "pixels": test.images[i].flatten().tolist()} for i in (*chosen, *unsteady["which"])
        ]
        return {
            "size": self.shape[-1],
            "networks": [
                {
                    "name": name,
                    "group": group_of(run.model).name,
                    "weights": sum(p.numel() for p in run.model.parameters()),
                    "error": run.tested.get("test_error"),
                    "classes": run.classes,
                }
                for name, run in self.runs.items()
            ],
            "groups": {name: _diagram(group) for name, group in PLANE_GROUPS.items()},
            "examples": examples[: len(chosen)],
            "errors": {"of": len(test[:TRIED]), "angles": TURNS, "networks": self._readers},
            "unsteady": {**unsteady, "examples": examples[len(chosen) :]},
        }

    @torch.no_grad()
    def _unsteady(self, images: Tensor) -> dict[str, Any]:
        """For how many of the images quarter turns change the answer of each network, and the first few for which they do."""
        changed = {}
        for name, run in self.runs.items() if len(images) else ():
            answers = torch.stack([self._logits(run, images.rot90(k, (-2, -1))).argmax(1) for k in range(4)])
            changed[name] = (answers != answers[0]).any(0)
        either = torch.stack(list(changed.values())).any(0).nonzero()[:12, 0].tolist() if changed else []
        return {"of": len(images), "counts": {name: int(c.sum()) for name, c in changed.items()}, "which": either}

    @torch.no_grad()
    def look(self, asked: dict[str, Any]) -> dict[str, Any]:
        """The image after its turn, the networks' answers to it, and its feature map on the chosen group."""
        image, angle, mirror = self._image(asked), _number(asked, "angle"), _flag(asked, "mirror")
        moved = _moved(image, angle, mirror)
        networks = []
        for name, run in self.runs.items():
            shares = self._logits(run, moved).softmax(1)[0]
            networks.append({"name": name, "probabilities": shares.tolist(), "answer": run.classes[int(shares.argmax())]})
        return {
            "image": moved.round().int().flatten().tolist(),
            "networks": networks,
            "map": self._map(asked, image, moved, angle, mirror),
        }

    @torch.no_grad()
    def angles(self, asked: dict[str, Any]) -> dict[str, Any]:
        """The answers to the image turned by every angle, and how much quarter turns change what each network computes."""
        image, mirror = self._image(asked), _flag(asked, "mirror")
        turns = torch.cat([_moved(image, 360 * i / ANGLES, mirror) for i in range(ANGLES)])
        found = []
        for name, run in self.runs.items():
            logits = self._logits(run, turns)
            shares, quarter = logits.softmax(1), logits[:: ANGLES // 4]
            change = (quarter - quarter[0]).abs().max() / quarter[0].abs().max()
            found.append(
                {
                    "name": name,
                    "answers": [run.classes[i] for i in shares.argmax(1).tolist()],
                    "probability": shares[:, int(shares[0].argmax())].tolist(),  # of the answer to the image as it was drawn
                    "quarter_turns": float(change),
                }
            )
        return {"networks": found}

    @torch.no_grad()
    def errors(self, asked: dict[str, Any]) -> dict[str, Any]:
        """How many of the first test digits a network misreads, in per cent, when all are turned by one of the angles.

        One network and one angle at a time, and each once: answers to the rest of the page do not wait for them.
        """
        name, step = asked.get("network"), asked.get("step")
        if name not in self._readers:
            raise ValueError(f"network: expected one of {', '.join(self._readers)}, got {name!r}")
        if type(step) is not int or not 0 <= step < TURNS:
            raise ValueError(f"step: expected a number from 0 to {TURNS - 1}, got {step!r}")
        if (name, step) not in self._errors:
            test = self.test[:TRIED]
            answers = self._logits(self.runs[name], _moved(test.images.float(), 360 * step / TURNS, mirror=False)).argmax(1)
            self._errors[name, step] = 100 * int((answers != test.labels).sum()) / len(test)
        return {"error": self._errors[name, step]}

    def _image(self, asked: dict[str, Any]) -> Tensor:
        pixels, count = asked.get("pixels"), math.prod(self.shape)
        if not isinstance(pixels, list) or len(pixels) != count:
            came = f"{len(pixels)} values" if isinstance(pixels, list) else type(pixels).__name__
            raise ValueError(f"pixels: expected a list of {count} numbers, {self.shape[1]} rows of {self.shape[2]}, got {came}")
        if not all(type(p) in (int, float) and 0 <= p <= 255 for p in pixels):
            raise ValueError("pixels: expected numbers from 0 (ground) to 255 (stroke)")
        return torch.tensor(pixels, dtype=torch.float32).reshape(1, *self.shape)

    def _logits(self, run: Run, images: Tensor) -> Tensor:
        unknown = Split(images, torch.zeros(len(images), dtype=torch.int64))
        return answers_of(run.model, run.inputs(unknown, torch.device("cpu")), run.config.test_turns)

    def _map(self, asked: dict[str, Any], image: Tensor, moved: Tensor, angle: float, mirror: bool) -> dict[str, Any]:
        """One channel on the group: by the first layer of a network of that group, or else by a filter made by hand."""
        name, channel = asked.get("group"), asked.get("channel", 0)
        if not isinstance(name, str) or name not in PLANE_GROUPS:
            raise ValueError(f"group: expected one of {', '.join(PLANE_GROUPS)}, got {name!r}")
        group = PLANE_GROUPS[name]
        owner = next((n for n, r in self.runs.items() if group_of(r.model) == group and group.order > 1), "")
        if owner:
            run = self.runs[owner]
            layer: Any = next(m for m in run.model.modules() if isinstance(m, LiftConv))
            channels, mean, std = layer.out_channels, run.mean, run.std
        else:
            psi = torch.tensor([[plot.SLOPE]])
            layer, channels, mean, std = (lambda x: gcorr(group, x, psi)), 1, 0.0, 255.0
        if type(channel) is not int or not 0 <= channel < channels:
            raise ValueError(f"channel: expected a number from 0 to {channels - 1}, got {channel!r}")
        element = _element(group, angle, mirror)
        upright = _on_lattice(group, (image - mean) / std)
        # an element acts exactly, on hexagons too
        x = _on_lattice(group, (moved - mean) / std) if element is None else act(group, element, upright)
        planes, still = layer(x)[0, channel].relu(), layer(upright)  # (S, n, n), (1, K, S, n, n)
        scale = float(still[0, channel].max().clamp(min=0)) or 1.0  # the same before and after a turn
        errors = [(layer(act(group, h, upright)) - act(group, h, still)).abs().max() for h in range(group.order)]
        return {
            "group": name,
            "from": owner,
            "channels": channels,
            "element": element,
            "error": float(max(errors) / still.abs().max().clamp(min=1e-30)),
            "size": planes.shape[-1],
            "planes": (planes * (255 / scale)).clamp(0, 255).round().int().flatten(1).tolist(),
        }


def _pretrained(name: str) -> Run:
    """The network of that name with its weights, as a run."""
    path = Path(str(files("gcnn.models").joinpath(PRETRAINED[name])))
    about, config = read(path)[1]["about"], Config(model=name, device="cpu")
    with torch.random.fork_rng(devices=[]):  # what it draws is thrown away
        model = load_into(make_model(config), path).eval()
    history = [{"epoch": config.epochs, "test_error": about["test_error"]}]
    return Run(model, config, tuple(about["classes"]), (1, 28, 28), about["mean"], about["std"], history, "digits")


def _moved(images: Tensor, angle: float, mirror: bool) -> Tensor:
    """Images mirrored left to right, if so asked, then turned anticlockwise: quarters exactly, the rest between pixels."""
    x = images.flip(-1) if mirror else images
    quarters, rest = divmod(angle, 90.0)
    x = torch.rot90(x, int(quarters) % 4, (-2, -1))
    return turned(x, torch.full((len(x),), math.radians(rest))).clamp(0, 255) if rest else x


def _on_lattice(group: Group, x: Tensor) -> Tensor:
    return x if group.fills_box else to_hexagonal(x, x.shape[-1] | 1)


def _isometries(group: Group) -> Any:
    """(S, 2, 2): what each element does to (row, column) in the plane, where hexagonal axes stand at 60 degrees."""
    basis = np.eye(2) if group.fills_box else np.array([[ROW, 0.0], [0.5, 1.0]])
    return basis @ group.arrays @ np.linalg.inv(basis)


def _element(group: Group, angle: float, mirror: bool) -> int | None:
    """The element that mirrors left to right, if so asked, and then turns by so many degrees; None if the group has none."""
    c, s = math.cos(math.radians(angle)), math.sin(math.radians(angle))
    wanted = np.array([[c, -s], [s, c]]) @ np.diag([1, -1 if mirror else 1])
    return next((i for i, found in enumerate(_isometries(group)) if np.allclose(found, wanted, atol=1e-6)), None)


def _diagram(group: Group) -> dict[str, Any]:
    """The Cayley diagram of a plane group, and each element as a mirror (left to right) and a turn after it."""
    places = plot.layout(group)
    elements = []
    for m in _isometries(group):
        mirror = bool(np.linalg.det(m) < 0)
        elements.append({"mirror": mirror, "angle": round(math.degrees(math.atan2(m[1, 0], m[0, 0]))) % 360})
    return {
        "names": plot.names(group),
        "places": [places[s] for s in range(group.order)],
        "product": group.product.tolist(),
        "rotation": plot.rotation(group),
        "mirror": plot.mirror(group),
        "elements": elements,
        "hexagonal": not group.fills_box,
    }


def _number(asked: dict[str, Any], name: str) -> float:
    value: Any = asked.get(name)
    if type(value) not in (int, float) or not abs(value) < 1e6:
        raise ValueError(f"{name}: expected a number of degrees, got {str(value)[:40]}")
    return float(value % 360)


def _flag(asked: dict[str, Any], name: str) -> bool:
    value = asked.get(name)
    if not isinstance(value, bool):
        raise ValueError(f"{name}: expected true or false, got {value!r}")
    return value


# --- the server ----------------------------------------------------------------------------------------------------------


def make_app(explorer: Explorer) -> Any:
    """The page and its questions as a Starlette application; what is wrong is answered in words, as JSON."""
    try:
        from starlette.applications import Starlette
        from starlette.concurrency import run_in_threadpool
        from starlette.exceptions import HTTPException
        from starlette.requests import Request
        from starlette.responses import HTMLResponse, JSONResponse, Response
        from starlette.routing import Route
    except ImportError as error:
        raise ImportError(MISSING) from error
    page = files("gcnn").joinpath("assets/explore.html").read_text(encoding="utf-8")
    about = explorer.about()
    most = max(BYTES, 24 * math.prod(explorer.shape))
    questions = {"/look": explorer.look, "/angles": explorer.angles, "/errors": explorer.errors}

    async def body(request: Request) -> dict[str, Any]:
        text = b""
        async for part in request.stream():
            text += part
            if len(text) > most:
                raise HTTPException(413, f"the request is longer than {most} bytes; send one image as a list of pixels")
        try:
            asked = request_json(text)
        except ValueError as error:
            raise HTTPException(400, f"the request is no JSON: {error}") from error
        if not isinstance(asked, dict):
            raise HTTPException(400, f"expected a JSON object with pixels, angle, mirror and group, got {type(asked).__name__}")
        return asked

    async def index(request: Request) -> Response:
        return HTMLResponse(page)

    async def tell(request: Request) -> Response:
        return JSONResponse(about)

    async def answer(request: Request) -> Response:
        asked = await body(request)
        try:
            return JSONResponse(await run_in_threadpool(questions[request.url.path], asked))
        except ValueError as error:
            raise HTTPException(400, str(error)) from error

    async def refuse(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return JSONResponse({"error": error.detail}, error.status_code, headers=error.headers)

    routes = [
        Route("/", index),
        Route("/about", tell),
        *(Route(path, answer, methods=["POST"]) for path in questions),
    ]
    return Starlette(routes=routes, exception_handlers={HTTPException: refuse})


def request_json(text: bytes) -> Any:
    """What a request says; NaN and infinities, which Python reads and JSON does not have, are refused."""

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is no number of JSON")

    try:
        return json.loads(text, parse_constant=refuse)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def serve(folders: Sequence[str | Path] = (), host: str = "127.0.0.1", port: int = 0, browser: bool = True) -> None:
    """Runs the page until Ctrl-C, and opens it in the browser; port 0 is any free one."""
    if not 0 <= port < 65_536:
        raise ValueError(f"port: expected 0 to 65535, got {port}")
    try:
        import uvicorn
    except ImportError as error:
        raise ImportError(MISSING) from error
    app = make_app(Explorer(folders))
    try:
        listener = socket.create_server((host, port))
    except OSError as error:
        raise OSError(f"{host}:{port} cannot be used ({error.strerror}); leave --port out for a free one") from error
    with listener:
        address = f"http://{host}:{listener.getsockname()[1]}/"
        print(f"gcnn explore: {address} (Ctrl-C ends it)", flush=True)
        if browser:
            webbrowser.open(address)
        uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listener])
