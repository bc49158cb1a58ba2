"""The explorer answers what the library computes, and bad questions in words; its page works in a browser."""

from __future__ import annotations

import base64
import http.client
import json
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from common import plane_groups
from gcnn import Group, explore, p4, p4m, plot
from gcnn.cli import main
from gcnn.data import Dataset, Split, digits
from gcnn.explore import Explorer, serve
from gcnn.functional import act
from gcnn.models import build
from gcnn.testing import equivariance_error
from gcnn.train import Config, train


@pytest.fixture(scope="module")
def explorer() -> Explorer:
    return Explorer()


@pytest.fixture(scope="module")
def pixels() -> list[int]:
    return list(map(int, digits().test.images[0].flatten()))


def asked(pixels: list[int], **changes: Any) -> dict[str, Any]:
    return {"pixels": pixels, "angle": 0, "mirror": False, "group": "p4", "channel": 0, **changes}


# --- what it answers -----------------------------------------------------------------------------------------------------


def test_answers_are_those_of_the_networks(explorer: Explorer, pixels: list[int]) -> None:
    image = torch.tensor(pixels, dtype=torch.float32).reshape(1, 1, 28, 28)
    look = explorer.look(asked(pixels, angle=90, mirror=True))
    turned = torch.rot90(image.flip(-1), 1, (-2, -1))
    assert look["image"] == turned.int().flatten().tolist()
    for name, found in zip(("p4cnn", "z2cnn"), look["networks"], strict=True):
        run = explorer.runs[found["name"]]
        assert found["name"] == name.upper()
        with torch.no_grad():
            shares = build(name, pretrained=True)((turned - run.mean) / run.std).softmax(1)[0]
        assert found["probabilities"] == pytest.approx(shares.tolist(), abs=1e-5)
        assert found["answer"] == str(int(shares.argmax()))


def test_p4cnn_repeats_itself_every_quarter_turn_and_z2cnn_does_not(explorer: Explorer, pixels: list[int]) -> None:
    ours, theirs = explorer.angles(asked(pixels))["networks"]
    quarter = explore.ANGLES // 4
    for k in range(1, 4):
        assert ours["probability"][k * quarter :] == pytest.approx(ours["probability"][: (4 - k) * quarter], abs=1e-4)
    assert theirs["probability"][quarter:] != pytest.approx(theirs["probability"][:-quarter], abs=1e-4)
    image = torch.tensor(pixels, dtype=torch.float32).reshape(1, 1, 28, 28)
    for found in (ours, theirs):
        run = explorer.runs[found["name"]]
        error = equivariance_error(run.model, p4, (image - run.mean) / run.std)
        assert found["quarter_turns"] == pytest.approx(error, rel=0.5, abs=1e-5)
    assert ours["quarter_turns"] < 1e-5 < theirs["quarter_turns"]


@plane_groups
def test_maps_turn_and_change_places_on_every_plane_group(explorer: Explorer, pixels: list[int], group: Group) -> None:
    """Through what the page is sent: its elements as turns and mirrors, and patches that go where the product says."""
    diagram = explorer.about()["groups"][group.name] if group is p4 else explore._diagram(group)
    assert diagram["names"] == plot.names(group)
    still = explorer.look(asked(pixels, group=group.name))["map"]
    assert still["element"] == 0
    for h, element in enumerate(diagram["elements"]):
        moved = explorer.look(asked(pixels, group=group.name, **element))["map"]
        assert moved["element"] == h
        assert moved["error"] < 1e-5
        f, g = (torch.tensor(m["planes"]).reshape(1, 1, group.order, m["size"], m["size"]) for m in (still, moved))
        assert int((act(group, h, f) - g).abs().max()) <= 1  # bytes, rounded
    if not still["from"]:
        assert still["channels"] == 1
    assert explorer.look(asked(pixels, group=group.name, angle=35))["map"]["element"] is None


def test_quarter_turns_change_answers_of_z2cnn_only(explorer: Explorer) -> None:
    found = explorer.about()["unsteady"]
    assert found["counts"]["P4CNN"] == 0 < found["counts"]["Z2CNN"] < found["of"] / 5
    for example in found["examples"]:
        answers = [
            {explorer.look(asked(example["pixels"], angle=a))["networks"][i]["answer"] for a in (0, 90, 180, 270)} for i in (0, 1)
        ]
        assert len(answers[0]) == 1 < len(answers[1])


def test_errors_by_angle_are_those_of_the_networks(explorer: Explorer) -> None:
    test, quarter = digits().test[: explore.TRIED], explore.TURNS // 4
    found = {}
    for name in ("p4cnn", "z2cnn"):
        run, model = explorer.runs[name.upper()], build(name, pretrained=True)
        steps = range(0, explore.TURNS, 2)
        errors = {step: explorer.errors({"network": name.upper(), "step": step})["error"] for step in steps}
        for k in range(4):
            with torch.no_grad():
                answers = model((test.images.float().rot90(k, (-2, -1)) - run.mean) / run.std).argmax(1)
            assert errors[k * quarter] == 100 * int((answers != test.labels).sum()) / explore.TRIED
        found[name] = {errors[step] == errors[(step + quarter) % explore.TURNS] for step in steps}
    assert found["p4cnn"] == {True}  # it repeats itself every 90 degrees
    assert False in found["z2cnn"]


def test_errors_are_counted_once(explorer: Explorer, monkeypatch: pytest.MonkeyPatch) -> None:
    first = explorer.errors({"network": "P4CNN", "step": 1})
    monkeypatch.setattr(explorer, "_logits", None)
    assert explorer.errors({"network": "P4CNN", "step": 1}) == first
    for question, words in (
        ({"network": "p4cnn", "step": 1}, "network: expected one of P4CNN, Z2CNN, got 'p4cnn'"),
        ({"network": ["P4CNN"], "step": 1}, "network: expected one of P4CNN, Z2CNN, got ['P4CNN']"),
        ({"network": "P4CNN", "step": 24}, "step: expected a number from 0 to 23, got 24"),
        ({"network": "P4CNN", "step": True}, "step: expected a number from 0 to 23, got True"),
    ):
        with pytest.raises(ValueError, match=re.escape(words)):
            explorer.errors(question)


def test_runs_of_the_user(tmp_path: Path, pixels: list[int]) -> None:
    data = digits()
    small = Dataset("digits", data.train[:64], data.test[:64], data.classes)
    for folder, group in (("mine", "p4m"), ("yours", "p6")):
        train(Config(group=group, channels=2, epochs=1, device="cpu"), tmp_path / folder, progress=False, data=small)
    explorer = Explorer([tmp_path / "mine", tmp_path / "yours"])
    for group, owner, channels in (("p4m", "mine", 2), ("p6", "yours", 2), ("p4", "", 1)):
        found = explorer.look(asked(pixels, group=group))["map"]
        assert (found["from"], found["channels"]) == (owner, channels)
    assert explorer.about()["networks"][0]["group"] == p4m.name
    named = Dataset("letters", small.train, small.test, tuple("abcdefghij"))
    train(Config(channels=2, epochs=1, device="cpu"), tmp_path / "letters", progress=False, data=named)
    assert Explorer([tmp_path / "letters"]).about()["errors"]["networks"] == []  # test digits are none of its classes
    with pytest.raises(FileNotFoundError, match="holds no checkpoint"):
        Explorer([tmp_path])
    with pytest.raises(ValueError, match="must have different names"):
        Explorer([tmp_path / "mine", tmp_path / "mine"])
    colour = Split(small.train.images.expand(-1, 3, -1, -1), small.train.labels)
    cifar = Dataset("cifar10", colour, colour, data.classes)
    train(Config(channels=2, epochs=1, device="cpu"), tmp_path / "colour", progress=False, data=cifar)
    with pytest.raises(ValueError, match=r"expected runs on gray square images of one size, got \(3, 28, 28\) for colour"):
        Explorer([tmp_path / "colour"])


# --- the server ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    command = [sys.executable, "-m", "gcnn", "explore", "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        line = server.stdout.readline()
        assert line.startswith("gcnn explore: http://127.0.0.1:")
        yield line.split()[2]
        server.terminate()


def get(address: str, path: str, method: str = "GET", body: Any = None) -> tuple[int, Any]:
    """The status and the answer, read where it is JSON."""
    connection = http.client.HTTPConnection(address.removeprefix("http://").rstrip("/"), timeout=60)
    try:
        connection.request(method, path, body)
        reply = connection.getresponse()
        text = reply.read().decode()
        return reply.status, json.loads(text) if reply.headers["content-type"] == "application/json" else text
    finally:
        connection.close()


def post(address: str, path: str, question: Any) -> tuple[int, Any]:
    return get(address, path, "POST", json.dumps(question))


def test_the_page_and_its_questions(address: str, pixels: list[int]) -> None:
    status, page = get(address, "/")
    assert status == 200
    assert not re.search(r"""(src|href)=["'](?!data:)|https?://(?!www\.w3\.org)|@import""", page)  # nothing from elsewhere
    assert len(get(address, "/about")[1]["groups"]) == 13
    assert post(address, "/look", asked(pixels))[1]["networks"][0]["name"] == "P4CNN"
    assert len(post(address, "/angles", asked(pixels))[1]["networks"][0]["answers"]) == explore.ANGLES


GOOD = asked([0] * 784)
BAD = {
    "no image": ({**GOOD, "pixels": "a cat"}, "pixels: expected a list of 784 numbers, 28 rows of 28, got str"),
    "none at all": ({}, "pixels: expected a list of 784 numbers, 28 rows of 28, got NoneType"),
    "wrong size": ({**GOOD, "pixels": [0] * 783}, "pixels: expected a list of 784 numbers, 28 rows of 28, got 783 values"),
    "too bright": ({**GOOD, "pixels": [256] * 784}, "pixels: expected numbers from 0 (ground) to 255 (stroke)"),
    "words": ({**GOOD, "pixels": ["1"] * 784}, "pixels: expected numbers from 0"),
    "truth values": ({**GOOD, "pixels": [True] * 784}, "pixels: expected numbers from 0"),
    "no angle": ({**GOOD, "angle": None}, "angle: expected a number of degrees, got None"),
    "a huge angle": ({**GOOD, "angle": 10**400}, "angle: expected a number of degrees"),
    "no truth": ({**GOOD, "mirror": 1}, "mirror: expected true or false, got 1"),
    "unknown group": ({**GOOD, "group": "p5"}, "group: expected one of p1, p2, pm, cm, pmm, cmm, p4, p4m, p3, "),
    "not of the plane": ({**GOOD, "group": "Oh"}, "group: expected one of p1"),
    "group of lists": ({**GOOD, "group": ["p4"]}, "group: expected one of p1"),
    "no such channel": ({**GOOD, "channel": 10}, "channel: expected a number from 0 to 9, got 10"),
    "channel before the first": ({**GOOD, "channel": -1}, "channel: expected a number from 0 to 9, got -1"),
    "a list": ([1, 2], "expected a JSON object with pixels, angle, mirror and group, got list"),
}


@pytest.mark.parametrize(("question", "words"), BAD.values(), ids=BAD.keys())
def test_bad_questions_are_answered_in_words(address: str, question: Any, words: str) -> None:
    status, found = post(address, "/look", question)
    assert status == 400
    assert words in found["error"]


def test_what_is_no_json_or_too_long_or_not_there(address: str) -> None:
    for text in (b"", b"{", b"\xff\xfe", b"\x89PNG\r\n", b"[" * 50_000, b'{"angle": NaN}', b'{"pixels": [1e999]}'):
        status, found = get(address, "/look", "POST", text)
        assert (status, list(found)) == (400, ["error"]), text
    assert "NaN is no number of JSON" in get(address, "/angles", "POST", b'{"angle": NaN}')[1]["error"]
    too_long = {"error": "the request is longer than 64000 bytes; send one image as a list of pixels"}
    assert get(address, "/look", "POST", b" " * 100_000) == (413, too_long)
    assert get(address, "/look", "POST", iter([b" " * 50_000] * 3)) == (413, too_long)  # in parts, no length given before
    assert get(address, "/look") == (405, {"error": "Method Not Allowed"})
    assert get(address, "/etc/passwd") == (404, {"error": "Not Found"})


def test_answers_come_while_the_hand_is_still_moving(address: str, pixels: list[int]) -> None:
    asks = [("/look", asked(pixels, angle=60, group=group)) for group in ("p4", "p6m")]
    asks += [("/angles", asked(pixels)), ("/errors", {"network": "P4CNN"})]
    others = iter(range(28))
    with ThreadPoolExecutor(1) as meanwhile:  # the page counts errors while one draws
        for path, question in asks:
            times = []
            for step in range(7):
                other = meanwhile.submit(post, address, "/errors", {"network": "Z2CNN", "step": next(others) % explore.TURNS})
                start = time.perf_counter()
                assert post(address, path, {**question, "step": step})[0] == 200
                times.append(time.perf_counter() - start)
                assert other.result()[0] == 200
            assert min(times) < 0.3, (path, times)


def test_the_command_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["explore", "--no-browser", "--port", str(port)]) == 1
        assert f"gcnn explore: 127.0.0.1:{port} cannot be used" in capsys.readouterr().err
    with pytest.raises(ValueError, match="port: expected 0 to 65535, got 99999"):
        serve(port=99_999)
    for missing in ("starlette.applications", "uvicorn"):
        with monkeypatch.context() as without:
            without.setitem(sys.modules, missing, None)
            assert main(["explore", "--no-browser"]) == 1
        assert 'needs starlette and uvicorn, which are not installed: pip install "gcnn[explore]"' in capsys.readouterr().err


# --- in a browser --------------------------------------------------------------------------------------------------------


class Page:
    """A page of headless Chromium, driven through its DevTools protocol."""

    def __init__(self, connection: Any) -> None:
        self.connection, self.count = connection, 0

    def do(self, method: str, **arguments: Any) -> Any:
        self.count += 1
        self.connection.send(json.dumps({"id": self.count, "method": method, "params": arguments}))
        while (reply := json.loads(self.connection.recv(timeout=60))).get("id") != self.count:
            pass
        assert "error" not in reply, reply
        return reply["result"]

    def js(self, expression: str) -> Any:
        return self.do("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)["result"].get("value")

    def wait_for(self, expression: str) -> Any:
        end = time.monotonic() + 30
        while not (found := self.js(expression)):
            assert time.monotonic() < end, (expression, self.js("document.body.innerText"))
            time.sleep(0.05)
        return found

    def click(self, name: str) -> None:
        self.js(f"document.getElementById({name!r}).click()")

    def answers(self, ready: str) -> list[str]:
        self.wait_for(f"document.body.dataset.ready === {ready!r} && !busy")
        return self.js("[...document.querySelectorAll('.net')].map(n => n.dataset.answer)")

    def draw(self, *points: tuple[float, float]) -> None:
        """A stroke of the mouse, in parts of the sheet."""
        box = self.js("JSON.stringify(document.getElementById('frame').getBoundingClientRect())")
        left, top, side = (json.loads(box)[k] for k in ("left", "top", "width"))
        for i, (x, y) in enumerate(points):
            kind = "mousePressed" if i == 0 else "mouseMoved"
            self.do(
                "Input.dispatchMouseEvent", type=kind, x=left + x * side, y=top + y * side, button="left", buttons=1, clickCount=1
            )
        self.do("Input.dispatchMouseEvent", type="mouseReleased", x=0, y=0, button="left", clickCount=1)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no browser is installed")
    from websockets.sync.client import connect

    folder = tmp_path_factory.mktemp("profile")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    flags += ["--disable-component-update", "--disable-sync", "--remote-debugging-port=0", f"--user-data-dir={folder}"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([browser, *flags, "about:blank"], **quiet) as running:  # type: ignore[call-overload]
        port, end = folder / "DevToolsActivePort", time.monotonic() + 60
        while not (port.exists() and port.read_text().strip()):
            assert time.monotonic() < end
            time.sleep(0.05)
        with urllib.request.urlopen(f"http://127.0.0.1:{port.read_text().split()[0]}/json/list") as reply:
            target = next(t for t in json.load(reply) if t["type"] == "page")
        with connect(target["webSocketDebuggerUrl"], max_size=None) as connection:
            made = Page(connection)
            yield made
            made.do("Browser.close")
        running.wait(30)


def test_a_drawn_digit_keeps_its_answer_when_it_is_turned(page: Page, address: str) -> None:
    page.do("Emulation.setDeviceMetricsOverride", width=1280, height=900, deviceScaleFactor=1, mobile=False)
    page.do("Page.navigate", url=address)
    page.answers("0,false,p4")
    page.click("clear")
    page.wait_for("document.querySelector('.net').dataset.answer === ''")
    page.draw((0.33, 0.25), (0.5, 0.24), (0.67, 0.25), (0.62, 0.4), (0.55, 0.6), (0.48, 0.8))
    drawn = page.answers("0,false,p4")
    assert drawn[0] == "7"
    shares = "[...document.querySelector('.net').querySelectorAll('.bar span:last-child')].map(s => s.textContent).join()"
    before, planes = page.js(shares), "patches.map(p => p.toDataURL())"
    first = page.js(planes)
    for quarter in (1, 2, 3):
        page.click("left")
        assert page.answers(f"{90 * quarter % 360},false,p4")[0] == "7"
        assert page.js(shares) == before
        assert page.js(planes) != first  # the patches have turned and changed places
    page.click("left")
    page.answers("0,false,p4")
    assert page.js(planes) == first
    page.click("flip")
    page.answers("0,true,p4")
    assert "no element of p4" in page.js("document.getElementById('law').textContent")
    assert page.js("document.getElementById('problem').textContent") == ""


def test_errors_by_angle_are_drawn(page: Page, address: str) -> None:
    page.do("Page.navigate", url="about:blank")
    page.do("Page.navigate", url=address)
    words = "[...document.querySelectorAll('#errors .change')].map(c => c.textContent)"
    page.wait_for(f"{words}.filter(Boolean).length === 2")
    assert page.js(words) == ["Repeats itself every 90°.", "Does not repeat itself every 90°."]
    curves = page.js("[...document.querySelectorAll('#errors path')].map(p => p.getAttribute('d').split('L').length)")
    assert curves == [explore.TURNS + 3] * 2


@pytest.mark.parametrize(
    "words", ["group=constructor", "group=__proto__", "digit=x.0", "digit=3.-1", "digit=.1", "angle=Infinity"]
)
def test_a_strange_address_opens_the_page_all_the_same(page: Page, address: str, words: str) -> None:
    page.do("Page.navigate", url="about:blank")
    page.do("Page.navigate", url=f"{address}#{words}")
    assert all(page.answers("0,false,p4"))
    assert page.js("document.getElementById('problem').textContent") == ""
    assert page.js("state.pixels.some(p => p > 0)")


def test_small_numbers_are_rounded_before_they_are_written(page: Page, address: str) -> None:
    page.do("Page.navigate", url=address)
    page.wait_for("typeof small === 'function'")
    for number, shown in ((9.7e-8, "1·10⁻⁷"), (2.4e-7, "2·10⁻⁷"), (9.96e-4, "1·10⁻³"), (0.25, "0.25"), (1e-9, "0")):
        assert page.js(f"small({number})") == shown


def test_nothing_moves_for_those_who_want_no_motion(page: Page, address: str) -> None:
    page.do("Emulation.setEmulatedMedia", features=[{"name": "prefers-reduced-motion", "value": "reduce"}])
    page.do("Page.navigate", url="about:blank")
    page.do("Page.navigate", url=f"{address}#group=p4")
    page.answers("0,false,p4")
    moves = "patches.some(p => p.style.transform) || $('diagram').classList.contains('moving')"
    assert page.js(f"$('left').click(), {moves}") is False
    assert page.js("getComputedStyle($('pad')).transitionDuration") == "0s"
    page.answers("90,false,p4")
    page.do("Emulation.setEmulatedMedia", features=[{"name": "prefers-reduced-motion", "value": ""}])
    assert page.js(f"$('left').click(), {moves}") is True
    page.answers("180,false,p4")


def test_the_page_works_from_the_keyboard(page: Page, address: str) -> None:
    page.do("Page.navigate", url="about:blank")
    page.do("Page.navigate", url=f"{address}#group=p6&angle=60&digit=4.1")
    page.answers("60,false,p6")
    page.click("clear")
    page.wait_for("document.querySelector('.net').dataset.answer === ''")
    assert page.js("$('keys').getBoundingClientRect().height") > 10  # the keys are written there for all to see
    page.js("document.getElementById('pad').focus()")
    for key in (" ", *["ArrowDown"] * 8):
        page.do("Input.dispatchKeyEvent", type="keyDown", key=key)
        page.do("Input.dispatchKeyEvent", type="keyUp", key=key)
    assert page.answers("60,false,p6")[0]
    assert page.js("state.pixels.filter(p => p > 0).length") > 20
    unnamed = "[...document.querySelectorAll('canvas[role=img], [role=img]')].filter(e => !e.getAttribute('aria-label')).length"
    assert page.js(unnamed) == 0
    reached = set()
    for _ in range(40):
        page.do("Input.dispatchKeyEvent", type="rawKeyDown", key="Tab", code="Tab", windowsVirtualKeyCode=9)
        reached.add(page.js("document.activeElement.id"))
    assert {"pad", "left", "right", "flip", "angle", "clear", "file", "group", "r"} <= reached


def test_images_are_loaded_whatever_their_size_and_ground(page: Page, address: str, tmp_path: Path, pixels: list[int]) -> None:
    from PIL import Image

    small = Image.new("L", (28, 28))
    small.putdata(pixels)
    large = Image.new("L", (500, 300), 250)  # a dark digit in a corner of a light sheet
    large.paste(Image.eval(small.resize((140, 140)), lambda v: 250 - v), (20, 30))
    large.save(tmp_path / "photo.png")
    (tmp_path / "text.png").write_text("no image")
    page.do("Page.navigate", url="about:blank")
    page.do("Page.navigate", url=f"{address}#group=p4")
    page.answers("0,false,p4")
    page.do("DOM.enable")

    def choose(name: str) -> None:
        root = page.do("DOM.getDocument")["root"]["nodeId"]
        node = page.do("DOM.querySelector", nodeId=root, selector="#file")["nodeId"]
        page.do("DOM.setFileInputFiles", nodeId=node, files=[str(tmp_path / name)])

    choose("photo.png")
    page.wait_for("state.example === '' && !busy && $('seen').getAttribute('aria-label')")
    assert page.answers("0,false,p4")[0] == str(int(digits().test.labels[0]))
    choose("text.png")
    assert page.wait_for("$('problem').textContent") == "text.png is no image that this browser can read."


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (1280, "dark"), (390, "light"), (390, "dark")])
def test_the_page_fits_its_window(page: Page, address: str, width: int, scheme: str) -> None:
    page.do("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 500)
    page.do("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    page.do("Page.navigate", url="about:blank")
    page.do("Page.navigate", url=f"{address}#group=p6m&digit=3.0")
    page.answers("0,false,p6m")
    assert page.js("document.documentElement.scrollWidth") <= width
    ground = page.js("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", ground))) < 300) == (scheme == "dark")
    picture = base64.b64decode(page.do("Page.captureScreenshot")["data"])
    assert len(picture) > 20_000  # a drawn page, not a blank one


def test_random_numbers_go_on_as_they_would() -> None:
    torch.manual_seed(1234)
    expected = torch.rand(3)
    torch.manual_seed(1234)
    Explorer()
    assert torch.equal(torch.rand(3), expected)
