"""The playground (docs/places.md) in headless Chromium, driven by Selenium, mostly by its keyboard. `./build.sh web
test` builds build/web and runs this. Prints TAP. `web.py picture` writes docs/playground.png instead.

A server of this process has the files of build/web in six variants, which differ in native.json:
    full     as built: the default run
    short    a run of 800 steps
    endless  a run that no test waits for
    false    a run of 800 steps, with another hash for the last arm
    lacking  no scalar.wasm
    alone    no native.json"""
import functools
import gzip
import http.server
import io
import json
import os
import re
import shutil
import subprocess
import sys
import threading

from PIL import Image
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
SITE = os.path.join(ROOT, "build", "web")
EXAMPLE = os.path.join(ROOT, "build", "web-example")
ARMS = ("fp32", "nearest", "stochastic", "kahan")
FILES = {"index.html", "playground.css", "playground.js", "worker.js", "scalar.wasm", "simd128.wasm", "native.json"}
LINKED = {"kahan_opt.h"}
CLOSE, APART = 0.005, 0.1  # losses: Kahan and stochastic are this close to fp32, nearest is this far above it
CURVE_PIXELS = 15  # a curve has at least this many pixels of exactly its colour


def native(*arguments):
    return subprocess.run([os.path.join(ROOT, "build", "playground"), *arguments], check=True, stdout=subprocess.PIPE,
                          text=True).stdout


with open(os.path.join(ROOT, "docs", "places.md"), encoding="utf-8") as file:
    PAGE = file.read()
# what it recommends to a server
POLICY = " ".join(re.search(r"^    Content-Security-Policy: (.*\n        .*)$", PAGE, re.M).group(1).split())
with open(os.path.join(SITE, "native.json"), encoding="utf-8") as file:
    FULL = json.load(file)
SHORT = json.loads(native("800"))
FALSE = json.loads(native("800"))
FALSE["arms"][3]["hash"] = FALSE["arms"][3]["hash"][:-1] + ("1" if FALSE["arms"][3]["hash"][-1] == "0" else "0")
VARIANTS = {"full": FULL, "short": SHORT, "endless": dict(FULL, steps=100 * 1000 * 1000), "false": FALSE,
            "lacking": FULL, "alone": None}

# ---- the server and the browser --------------------------------------------------------------------------------------

requests = []  # (variant, file, status)


class Handler(http.server.SimpleHTTPRequestHandler):
    def do_GET(self):
        variant, _, name = self.path.split("?")[0][1:].partition("/")
        self.path = "/" + name
        if VARIANTS.get(variant) and name == "native.json":
            body = json.dumps(VARIANTS[variant]).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
        elif variant == "example":
            self.directory = EXAMPLE
            super().do_GET()
        elif variant not in VARIANTS or (variant, name) in (
                ("lacking", "scalar.wasm"), ("alone", "native.json")):
            self.send_error(404)
        else:
            super().do_GET()

    def send_response(self, code, message=None):
        requests.append((self.requestline.split("/")[1], self.path.lstrip("/") or "index.html", code))
        super().send_response(code, message)

    def end_headers(self):
        self.send_header("Content-Security-Policy", POLICY)
        self.send_header("Cache-Control", "no-store")
        super().end_headers()

    def log_message(self, *_):
        pass


def start_browser():
    options = webdriver.ChromeOptions()
    options.binary_location = "/usr/bin/chromium"
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu",
                     "--hide-scrollbars", "--no-first-run", "--disable-background-networking",
                     "--disable-component-update", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"):
        options.add_argument(argument)
    options.ignore_local_proxy_environment_variables()
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    return webdriver.Chrome(service=Service("/usr/bin/chromedriver", log_path=os.devnull), options=options)


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=SITE))
threading.Thread(target=server.serve_forever, daemon=True).start()
BASE = "http://127.0.0.1:%d/" % server.server_address[1]
driver = start_browser()
script = driver.execute_script
urls, messages = [], []  # what the browser requested, and what is in its console


def text(selector):
    return script("return document.querySelector(arguments[0]).textContent", selector)


def collect():
    messages.extend(entry["message"] for entry in driver.get_log("browser"))
    for entry in driver.get_log("performance"):
        event = json.loads(entry["message"])["message"]
        if event["method"] == "Network.requestWillBeSent":
            urls.append(event["params"]["request"]["url"])


def wait(*states):
    def there(_):
        return script("return document.body.dataset.state ?? ''") in states
    WebDriverWait(driver, 60, poll_frequency=0.05).until(there, "the page is not " + " or ".join(states))


def visit(variant, query="", state="ready"):
    driver.get(BASE + variant + "/?wait&" + query)
    wait(state)
    script("document.querySelector('details').open = true")


def frames(count):
    driver.execute_async_script("""const [count, done] = arguments;
        const next = left => left ? requestAnimationFrame(() => next(left - 1)) : done();
        next(count);""", count)


def emulate(width=1000, height=2400, scheme="light", motion="no-preference"):
    features = [{"name": "prefers-color-scheme", "value": scheme}, {"name": "prefers-reduced-motion", "value": motion}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride",
                           {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False})
    frames(2)  # the curves have been drawn for this size


def focused():
    return script("return document.activeElement.id")


def press(*keys):
    ActionChains(driver).send_keys(*keys).perform()


def tab_to(name):
    for _ in range(20):
        if focused() == name:
            return
        press(Keys.TAB)
    raise AssertionError("the tab key does not reach " + name)


def run():
    tab_to("start")
    press(Keys.SPACE)
    wait("done", "failed")


def rows():
    """Per arm: loss, verdict, hash, native hash."""
    return script("""return arguments[0].map(arm => ["-loss", " b", " .here", " .native"].map(
        part => document.querySelector("#" + arm + part).textContent))""", ARMS)


def maps():
    """Per arm: how much of the middle of its map has another colour than that of fp32."""
    return script("""const dark = arguments[0].map(arm => {
            const canvas = document.getElementById(arm + "-map"), at = canvas.width / 4;
            const {data} = canvas.getContext("2d").getImageData(at, at, 2 * at, 2 * at);
            return data.filter((_, i) => i % 4 === 0).map(red => red < 169);
        });
        return dark.map(map => map.filter((pixel, i) => pixel !== dark[0][i]).length / map.length);""", ARMS)


def setting(name):
    return script("return document.getElementById(arguments[0]).value", name + "-text")


# ---- checks: each raises an AssertionError, with a word about what is wrong ------------------------------------------


def equal(got, wanted):
    assert got == wanted, "%s instead of %s" % (got, wanted)


def check_files():
    equal(set(os.listdir(SITE)), FILES | LINKED)
    limits = {name: [int(n.replace(",", "")) for n in numbers]
              for name, *numbers in re.findall(r"^\| `(\w+\.wasm)` \| ([\d,]+) \| ([\d,]+) \|$", PAGE, re.M)}
    for name in ("scalar.wasm", "simd128.wasm"):
        with open(os.path.join(SITE, name), "rb") as wasm:
            content = wasm.read()
        sizes = [len(gzip.compress(content, 9)), len(content)]
        print("# %s: %d bytes, compressed %d" % (name, sizes[1], sizes[0]))
        assert all(size <= limit for size, limit in zip(sizes, limits[name])), "%s has %s bytes; limits: %s" % (
            name, sizes, limits[name])


def check_table():
    table = dict(re.findall(r"^\| (loss|hash) \| (.*) \|$", PAGE, re.M))
    equal(table["loss"].split(" | "), ["%.4f" % arm["loss"] for arm in FULL["arms"]])
    equal(table["hash"].split(" | "), [arm["hash"] for arm in FULL["arms"]])


def check_example():
    """The program of docs/places.md: the C file, the command and the JavaScript."""
    source = re.search(r"^```c\n(/\* my_page\.c.*?)^```$", PAGE, re.M | re.S).group(1)
    command, use = (re.search(r"^((    %s.*\n)(    .*\n)*)" % first, PAGE, re.M).group(1)
                    for first in ("clang ", r"const \{instance\}"))
    os.makedirs(EXAMPLE, exist_ok=True)
    with open(os.path.join(EXAMPLE, "my_page.c"), "w", encoding="utf-8") as file:
        file.write(source)
    shutil.copy(os.path.join(ROOT, "kahan_opt.h"), EXAMPLE)
    subprocess.run(command, shell=True, check=True, cwd=EXAMPLE)
    with open(os.path.join(EXAMPLE, "index.html"), "w", encoding="utf-8") as file:
        file.write('<!doctype html><title>Example</title><link rel="icon" href="data:,">')
    driver.get(BASE + "example/")
    got = driver.execute_async_script("const done = arguments[0]; (async () => {" + use +
                                      "done([first, weight.length]); })().catch(e => done(String(e)))")
    assert isinstance(got, list) and got[1] == 1000 and abs(got[0] + 0.1) < 0.002, "100 steps of 1e-3: %s" % got


def check_exports():
    visit("full")
    for name in ("scalar", "simd128"):
        got = driver.execute_async_script("""fetch(arguments[0]).then(file => file.arrayBuffer()).then(async bytes => {
            const module = await WebAssembly.compile(bytes), of = part => WebAssembly.Module[part](module);
            arguments[1]([of("exports").map(e => e.name).sort().join(" "), of("imports").length]); });""",
                                          name + ".wasm")
        equal(got, ["hash isa map memory points reset set train", 0])


def check_load():
    visit("full")
    equal(driver.title, "kahan_opt: training in bf16")
    equal(text("#status"), "Ready")
    equal([setting(name) for name in ("lr", "weight_decay", "beta2")], ["1.0e-3", "0.01", "0.99900"])
    equal([row[3] for row in rows()], [arm["hash"] for arm in FULL["arms"]])
    assert script("return document.getElementById('simd128').checked"), "simd128 is not chosen"


def check_opening():
    driver.get(BASE + "short/")
    wait("done")
    equal([row[1] for row in rows()], ["equal"] * 4)
    assert not script("return document.querySelector('details').open"), "the hashes are shown at once"
    emulate(motion="reduce")
    driver.get(BASE + "short/")
    wait("ready")
    emulate(width=390, height=844)
    start, chart, end = (script("const r = document.getElementById(arguments[0]).getBoundingClientRect();"
                                "return [r.top, r.bottom]", name) for name in ("start", "chart", "status"))
    assert start[1] < chart[0] < start[1] + 40 and chart[1] < 844, "Start %s, chart %s" % (start, chart)
    emulate()


def check_maps():
    differ = dict(zip(ARMS, maps()))
    print("# other than in fp32: " + ", ".join("%s %.3f" % item for item in differ.items()))
    assert max(differ["kahan"], differ["stochastic"]) < 0.05 < 0.1 < differ["nearest"], differ


def check_default_run(code):
    visit("full", "code=" + code)
    if code == "scalar":  # this run counts how often the curves are drawn with reduced motion
        emulate(motion="reduce")
        script("""window.draws = 0; new MutationObserver(() => { window.draws++; })
            .observe(document.getElementById("fp32-curve"), {attributes: true});""")
    run()
    for arm, row, wanted in zip(ARMS, rows(), FULL["arms"]):
        equal((arm, *row), (arm, "%.4f" % wanted["loss"], "equal", wanted["hash"], wanted["hash"]))
    equal(text("#status"), "Done. The bits of all four runs are equal to the native ones.")
    assert re.fullmatch(r"[\d,]+ steps/s", text("#%s-speed" % code)), "no speed of " + code
    assert re.fullmatch(r"[a-z]+\d*", text("#isa")), "no instruction set"
    print("# %s: %s, the library's %s code" % (code, text("#%s-speed" % code), text("#isa")))


def check_losses():
    loss = {arm: float(row[0]) for arm, row in zip(ARMS, rows())}
    print("# " + ", ".join("%s %.4f" % item for item in loss.items()))
    for arm in ("kahan", "stochastic"):
        assert abs(loss[arm] - loss["fp32"]) <= CLOSE, "%s is not within %g of fp32" % (arm, CLOSE)
    assert loss["nearest"] >= loss["fp32"] + APART, "nearest is not %g above fp32" % APART
    ends = {arm: script("return Number(document.getElementById(arguments[0] + '-curve')"
                        ".getAttribute('d').split(' ').at(-1))", arm) for arm in ARMS}
    assert abs(ends["kahan"] - ends["fp32"]) < 5 and ends["nearest"] < ends["fp32"] - 50, "the curves: %s" % ends


def check_motion():
    draws = script("return window.draws")
    assert 2 <= draws <= 14, "with reduced motion the curves are drawn %d times" % draws
    emulate()


def pixels(width, scheme):
    emulate(width=width, scheme=scheme)
    style = "getComputedStyle(document.%s).%s"
    rgb = lambda value: tuple(int(n) for n in re.findall(r"\d+", value)[:3])
    back = rgb(script("return " + style % ("body", "backgroundColor")))
    curves = {arm: rgb(script("return " + style % ("getElementById(arguments[0] + '-curve')", "stroke"), arm))
              for arm in ARMS}
    box = script("const r = document.getElementById('chart').getBoundingClientRect();"
                 "return [r.left, r.top, r.right, r.bottom].map(Math.round)")
    picture = Image.open(io.BytesIO(driver.get_screenshot_as_png())).convert("RGB")
    colours = {colour: n for n, colour in picture.getcolors(1 << 24)}
    chart = {colour: n for n, colour in picture.crop(box).getcolors(1 << 24)}
    assert len(colours) > 50, "%d colours" % len(colours)
    equal(max(colours, key=colours.get), back)
    assert (sum(back) > 600) == (scheme == "light"), "the background is %s" % (back,)
    assert len(set(curves.values())) == 4, "two curves have one colour"
    for arm in ARMS:
        assert chart.get(curves[arm], 0) >= CURVE_PIXELS, "the curve of %s has %d pixels" % (
            arm, chart.get(curves[arm], 0))
    wide, inner = script("return [document.documentElement.scrollWidth, innerWidth]")
    assert wide <= inner, "the page is %d pixels wide in %d" % (wide, inner)


def check_pixels():
    for scheme in ("light", "dark"):
        for width in (1000, 320):
            try:
                pixels(width, scheme)
            except AssertionError as error:
                raise AssertionError("%s, %d pixels: %s" % (scheme, width, error)) from error
    emulate()


CONTRAST = """
const channel = c => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
const light = rgb => [0.2126, 0.7152, 0.0722].reduce((sum, f, i) => sum + f * channel(rgb[i]), 0);
const rgb = text => text.match(/[\\d.]+/g).map(Number);
const back = element => {
    for (; element; element = element.parentElement) {
        const colour = rgb(getComputedStyle(element).backgroundColor);
        if (colour.length < 4 || colour[3] > 0) return colour;
    }
};
const low = [];
const check = (element, colour, least) => {
    const [a, b] = [light(rgb(colour)), light(back(element))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < least) low.push(`${element.tagName} ${element.textContent.trim()} ${ratio.toFixed(2)}`);
};
let texts = 0;
for (const element of document.querySelectorAll("main, main *")) {
    const own = [...element.childNodes].some(node => node.nodeType === 3 && node.data.trim());
    if (!own || element.closest("noscript") || !element.getClientRects().length) continue;
    texts++;
    check(element, getComputedStyle(element)[element instanceof SVGElement ? "fill" : "color"], 4.5);
}
for (const curve of document.querySelectorAll(".curve")) check(curve, getComputedStyle(curve).stroke, 3);
return [texts, low];
"""


def check_contrast():
    for scheme in ("light", "dark"):
        emulate(scheme=scheme)
        texts, low = script(CONTRAST)
        assert texts > 40 and not low, "%s, %d texts: %s" % (scheme, texts, low)
    dashes = {script("return getComputedStyle(document.querySelector(arguments[0])).strokeDasharray", ".curve." + arm)
              for arm in ARMS}
    equal(len(dashes), 4)
    emulate()


def check_names():
    nameless = script("""return [...document.querySelectorAll("input, button, output")].filter(element =>
        element.tagName === "OUTPUT" ? !element.htmlFor.length : !(element.labels?.length || element.textContent))
        .map(element => element.id)""")
    equal(nameless, [])
    equal(script("return document.getElementById('status').role"), "status")
    equal(script("return document.querySelectorAll('th[scope]').length"), 6)
    assert len(script("return document.getElementById('chart').ariaLabel")) > 20, "the chart has no label"
    equal(script("return [...document.querySelectorAll('canvas')].filter(c => c.ariaLabel).length"), 4)


def check_tab():
    visit("short")
    order = []
    while len(order) < 20 and (focused() or not order):
        press(Keys.TAB)
        order.append(focused())
        if order[-1]:
            ring = script("const s = getComputedStyle(document.activeElement);"
                          "return s.outlineStyle === 'solid' && parseFloat(s.outlineWidth) >= 2")
            assert ring, "the focus on %s cannot be seen" % order[-1]
    equal(order[:9], ["home", "start", "reset", "defaults", "lr", "weight_decay", "beta2", "more", "simd128"])
    equal([name for name in order[9:] if name], [])


def check_sliders():
    visit("short")
    for name, ends in (("lr", ("1.0e-5", "1.0e-1")), ("weight_decay", ("0.00", "1.00")),
                       ("beta2", ("0.90000", "0.99990"))):
        tab_to(name)
        before = setting(name)
        press(Keys.ARROW_RIGHT)
        up = setting(name)
        assert float(up) > float(before), "%s: %s, then %s" % (name, before, up)
        equal(script("return document.getElementById(arguments[0]).ariaValueText", name), up)
        press(Keys.ARROW_LEFT)
        equal(setting(name), before)
        press(Keys.HOME)
        low = setting(name)
        press(Keys.END)
        equal((low, setting(name)), ends)
    tab_to("defaults")
    press(Keys.ENTER)
    equal([setting(name) for name in ("lr", "weight_decay", "beta2")], ["1.0e-3", "0.01", "0.99900"])


def check_buttons():
    visit("endless")
    tab_to("start")
    for key, state, label in ((Keys.SPACE, "running", "Pause"), (Keys.ENTER, "paused", "Continue"),
                              (Keys.SPACE, "running", "Pause")):
        press(key)
        wait(state)
        equal(text("#start"), label)
        if state == "paused":
            before = text("#status"), rows()
            frames(10)
            assert re.match(r"Paused at step [\d,]+$", before[0]), before[0]
            equal((text("#status"), rows()), before)
    tab_to("reset")
    press(Keys.SPACE)
    equal((script("return document.body.dataset.state"), text("#start"), text("#status")), ("ready", "Start", "Ready"))
    equal([(row[0], row[2]) for row in rows()], [("–", "–")] * 4)


def check_code_switch():
    visit("short")
    run()
    simd = rows()
    tab_to("simd128")
    press(Keys.ARROW_UP)
    equal((focused(), script("return document.body.dataset.state")), ("scalar", "ready"))
    equal(rows()[0][2], "–")
    run()
    equal(rows(), simd)
    equal([row[1] for row in simd], ["equal"] * 4)
    for name in ("scalar", "simd128"):
        assert text("#%s-speed" % name).endswith("steps/s"), "no speed of " + name


def check_other_settings():
    visit("short")
    tab_to("lr")
    press(Keys.ARROW_RIGHT)
    run()
    equal([row[1] for row in rows()], ["other settings"] * 4)
    assert all(row[2] != row[3] for row in rows()), "another learning rate does not change the bits"
    tab_to("defaults")
    press(Keys.SPACE)
    run()
    equal([row[1] for row in rows()], ["equal"] * 4)


def check_change_in_run():
    visit("endless")
    tab_to("start")
    press(Keys.SPACE)
    tab_to("lr")
    press(Keys.ARROW_RIGHT, Keys.ARROW_LEFT)
    equal(script("return document.body.dataset.state"), "running")
    tab_to("reset")
    press(Keys.SPACE)
    equal(script("return document.body.dataset.state"), "ready")


def check_false_hash():
    visit("false")
    run()
    equal([row[1] for row in rows()], ["equal"] * 3 + ["different"])
    equal(text("#status"), "Done. The bits are different from the native ones.")


def check_reload():
    visit("endless")
    tab_to("start")
    press(Keys.SPACE)
    wait("running")
    driver.refresh()
    wait("ready")
    equal(rows()[0][:3], ["–", "", "–"])
    tab_to("start")
    press(Keys.SPACE)
    wait("running")
    visit("short")
    run()
    equal([row[1] for row in rows()], ["equal"] * 4)


def check_clamp():
    for query, wanted in (("lr=99&weight_decay=-3&beta2=2", ["1.0e-1", "0.00", "0.99990"]),
                          ("lr=0&weight_decay=Infinity&beta2=-1e99", ["1.0e-5", "1.00", "0.90000"]),
                          ("lr=NaN&weight_decay=&beta2=%22%3Cb%3E", ["1.0e-3", "0.01", "0.99900"]),
                          ("lr=3e-4&weight_decay=0.1&beta2=0.99&code=none", ["3.2e-4", "0.10", "0.99000"])):
        visit("short", query)
        equal([setting(name) for name in ("lr", "weight_decay", "beta2")], wanted)
    visit("short", "lr=1e99")
    run()
    equal([row[1] for row in rows()], ["other settings"] * 4)


def check_refusals():
    """What the page cannot ask for, asked of the WebAssembly itself: -1, and not a bit changes."""
    visit("short")
    got = driver.execute_async_script("""const [code, done] = arguments;
        fetch(code).then(file => file.arrayBuffer()).then(bytes => WebAssembly.instantiate(bytes)).then(made => {
            const {reset, set, train, hash} = made.instance.exports, arms = [0, 1, 2, 3], wrong = [];
            const bits = () => arms.map(a => BigInt.asUintN(64, hash(a)).toString(16).padStart(16, "0"));
            const started = reset();
            const before = bits().join();
            for (const [lr, decay, beta2] of [[NaN, 0, 0.9], [Infinity, 0, 0.9], [-1e-3, 0, 0.9], [1e-3, -1, 0.9],
                    [1e-3, NaN, 0.9], [1e-3, 0, 1], [1e-3, 0, -0.5], [1e-3, 0, NaN]]) {
                set(lr, decay, beta2);
                if (arms.some(a => train(a, 10) !== -1) || bits().join() !== before) wrong.push([lr, decay, beta2]);
            }
            set(1e-3, 0.01, 0.999);
            for (const [arm, steps] of [[-1, 10], [4, 10], [1 << 30, 10], [0, 0], [0, -5]])
                if (train(arm, steps) !== -1 || bits().join() !== before) wrong.push([arm, steps]);
            arms.forEach(a => train(a, 800));
            done([started, hash(-1) === 0n && hash(4) === 0n, wrong, bits()]);
        })""", "scalar.wasm")
    equal(got, [0, True, [], [arm["hash"] for arm in SHORT["arms"]]])


def check_without_simd():
    added = driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument",
                                   {"source": "WebAssembly.validate = () => false"})
    visit("short")
    driver.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", added)
    equal(script("return [...document.querySelectorAll('[name=code]')].map(r => [r.checked, r.disabled])"),
          [[True, False], [False, True]])
    equal(text("#simd128-speed"), "this browser does not have it")
    run()
    equal([row[1] for row in rows()], ["equal"] * 4)


def check_console():
    collect()
    equal(messages, [])


def check_requests():
    strange = [url for url in urls if not url.startswith((BASE, "data:"))]
    equal(strange, [])
    assert len(urls) > 50, "%d requests" % len(urls)
    equal({name for variant, name, _ in requests if variant != "example"}, FILES)
    equal({status for _, _, status in requests}, {200})


def check_lacking():
    visit("lacking", state="failed")
    equal(text("#status"), "Failed: scalar.wasm: 404")


def check_alone():
    visit("alone", "code=simd128")
    run()
    equal(text("#status"), "Done. This server has no hashes of the native program to compare with.")
    equal([row[1:] for row in rows()], [["", arm["hash"], "–"] for arm in FULL["arms"]])


def check_names_of_curves():
    """At the end of each curve; none on another, and none outside of the chart."""
    boxes = script("""const chart = document.getElementById("chart").getBoundingClientRect();
        return arguments[0].map(arm => {
            const name = document.getElementById(arm + "-name"), box = name.getBoundingClientRect();
            return [name.textContent, box.top, box.bottom, chart.right - box.right, box.left - chart.left,
                box.top - chart.top];
        })""", ARMS)
    equal([box[0] for box in boxes], ["fp32", "nearest", "stochastic", "Kahan"])
    for _, top, bottom, right, left, above in boxes:
        assert min(right, left, above) >= 0, "a name is outside of the chart: %s" % boxes
        assert sum(top < other[2] - 4 and other[1] + 4 < bottom for other in boxes) == 1, "names overlap: %s" % boxes


def check_file():
    driver.get("file://" + os.path.abspath(os.path.join(SITE, "index.html")))
    equal(text("#status"), "Loading. This page needs a web server: opened as a file, it stays here.")


CHECKS = (
    ("build/web has these files and no others; docs/places.md has limits for the WebAssembly", check_files),
    ("... and the losses and hashes of the native program", check_table),
    ("the WebAssembly exports seven functions and its memory, and imports nothing", check_exports),
    ("the page opens training, not with reduced motion; the chart is directly under Start on a phone", check_opening),
    ("... with the default settings, the native hashes, and simd128", check_load),
    ("the default run, simd128: loss and bits of each arm are the native ones",
     functools.partial(check_default_run, "simd128")),
    ("... Kahan and stochastic end within %g of fp32, nearest %g above it" % (CLOSE, APART), check_losses),
    ("... each has its name at its end", check_names_of_curves),
    ("... so do their maps", check_maps),
    ("... every curve is there, light and dark, in 1000 and 320 pixels", check_pixels),
    ("... texts have a contrast of 4.5, curves of 3; each curve has dashes of its own", check_contrast),
    ("... every control has a name, the status is announced, the table has headers", check_names),
    ("the default run, scalar: loss and bits of each arm are the native ones",
     functools.partial(check_default_run, "scalar")),
    ("... with reduced motion the curves are drawn some ten times", check_motion),
    ("the tab key visits each control once, and the focus is visible", check_tab),
    ("sliders move with arrow keys, Home and End; Defaults moves them back", check_sliders),
    ("Start, Pause, Continue and Reset work with Space and Enter", check_buttons),
    ("the arrow keys switch to scalar code, which begins again; the bits are the same", check_code_switch),
    ("other settings give other bits, and are not compared with the native ones", check_other_settings),
    ("a slider moves during a run", check_change_in_run),
    ("a hash that is not the native one is called different", check_false_hash),
    ("a reload during training", check_reload),
    ("settings in the address: out of range becomes the nearest end, no number the default", check_clamp),
    ("the WebAssembly refuses bad settings, arms and steps, and changes nothing", check_refusals),
    ("the example of docs/places.md, as it stands there", check_example),
    ("a browser without simd128 gets scalar code", check_without_simd),
    ("the console is empty", check_console),
    ("all requests were for files of build/web, and the server has them all", check_requests),
    ("a file that is missing is named", check_lacking),
    ("without native.json the page trains all the same, to the same bits", check_alone),
    ("opened as a file, the page says what it needs", check_file),
)


def picture():
    """docs/playground.png: after both default runs, in 256 colours."""
    emulate(width=1000, height=1000)
    visit("full", "code=scalar")
    run()
    tab_to("scalar")
    press(Keys.ARROW_DOWN)
    run()
    script("document.activeElement.blur()")
    height = script("return document.querySelector('main').getBoundingClientRect().bottom")
    emulate(width=1000, height=round(height))
    image = Image.open(io.BytesIO(driver.get_screenshot_as_png())).convert("RGB")
    image.quantize(256, dither=Image.Dither.NONE).save(os.path.join(ROOT, "docs", "playground.png"), optimize=True)
    print("docs/playground.png: %d x %d" % image.size)


def main():
    emulate()
    if sys.argv[1:] == ["picture"]:
        picture()
        return 0
    failed = 0
    for number, (what, check) in enumerate(CHECKS, 1):
        try:
            check()
            print("ok %d - %s" % (number, what), flush=True)
        except Exception as error:  # Selenium's, too
            failed += 1
            print("not ok %d - %s" % (number, what))
            print("# %s: %s" % (type(error).__name__, str(error).split("\nStacktrace")[0].replace("\n", "\n# ")),
                  flush=True)
    print("1..%d" % len(CHECKS))
    return failed != 0


try:
    code = main()
finally:
    driver.quit()
    server.shutdown()
sys.exit(code)
