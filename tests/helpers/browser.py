"""A real headless Chromium for tests of pages; where there is none, the tests skip and say so."""

import base64
import io
import json
import os
import shutil
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from numpy.typing import NDArray

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--hide-scrollbars", "--disable-dev-shm-usage",
)  # fmt: skip
AXE_VERSION = "4.10.3"
PATIENCE = 30.0  # seconds; a busy machine is slow, a broken page never gets there
BROWSERS_OWN = ("chrome:", "chrome-untrusted:", "chrome-extension:", "devtools:")  # addresses that no report asks for


@contextmanager
def chromium() -> Iterator["Chrome"]:
    """Yield a browser with an empty profile; skips the test where selenium, Chromium or its driver is missing."""
    pytest.importorskip("selenium", reason="selenium is not installed; it comes with the extra `dev`")
    binary = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if not binary or not driver:
        pytest.skip("no Chromium with its driver here; Debian has both: apt-get install chromium chromium-driver")
    from selenium.webdriver import Chrome
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = Options()
        options.binary_location = binary
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        browser = Chrome(options=options, service=Service(driver))
        try:
            browser.set_script_timeout(PATIENCE)
            _leave_the_new_tab_page(browser)
            yield browser
        finally:
            browser.quit()


def _leave_the_new_tab_page(browser: "Chrome") -> None:
    """Go on in an empty tab of our own: the first tab loads the browser's page, on a busy machine long after start."""
    first = browser.current_window_handle
    browser.switch_to.new_window("tab")
    own = browser.current_window_handle
    browser.switch_to.window(first)
    browser.close()
    browser.switch_to.window(own)


def open_page(browser: "Chrome", url: str, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
    """Open a report at the given size and wait until its scripts have drawn it."""
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False},
    )
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
    browser.get(url)
    wait_until(lambda: browser.execute_script("return document.documentElement.dataset.ready === 'true'"))


def wait_until(holds: Callable[[], object]) -> None:
    """Wait until the condition holds; fails after PATIENCE seconds."""
    end = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < end, "the page did not get there"
        time.sleep(0.02)


def console_errors(browser: "Chrome") -> list[str]:
    """Return what the console has complained about since last asked, the browser's own pages aside."""
    found = [entry["message"] for entry in _log(browser, "browser") if entry["level"] in ("SEVERE", "WARNING")]
    return [message for message in found if not message.startswith(BROWSERS_OWN)]


def network_requests(browser: "Chrome") -> list[str]:
    """Return the addresses that pages in the present tab asked for since last asked, embedded data aside."""
    entries = [json.loads(entry["message"]) for entry in _log(browser, "performance")]
    here = [entry["message"] for entry in entries if entry["webview"] == browser.current_window_handle]
    sent = [event["params"] for event in here if event["method"] == "Network.requestWillBeSent"]
    urls = [params["request"]["url"] for params in sent if not params["documentURL"].startswith(BROWSERS_OWN)]
    return [url for url in urls if not url.startswith("data:")]


def _log(browser: Any, kind: str) -> list[dict[str, Any]]:
    return list(browser.get_log(kind))


def pixels(browser: "Chrome", selector: str) -> NDArray[np.uint8]:
    """Return the [height, width, 3] pixels of the first element that the selector finds."""
    from PIL import Image

    box = browser.execute_script(
        "const e = document.querySelector(arguments[0]); e.scrollIntoView(); const b = e.getBoundingClientRect();"
        "return [b.left + scrollX, b.top + scrollY, b.width, b.height]",
        selector,
    )
    clip = dict(zip(("x", "y", "width", "height"), box, strict=True)) | {"scale": 1}
    shot = browser.execute_cdp_cmd(
        "Page.captureScreenshot", {"format": "png", "captureBeyondViewport": True, "clip": clip}
    )
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(shot["data"]))).convert("RGB"))


def axe_source() -> str:
    """Return the text of axe-core, from the cache or fetched into it by npm; skips the test where neither works."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dqnfed-tests"
    script = cache / f"axe-core-{AXE_VERSION}.min.js"
    if not script.is_file():
        npm = shutil.which("npm")
        if npm is None:
            pytest.skip(f"axe-core is not in {cache}, and there is no npm to fetch it with")
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as scratch:
            command = [npm, "pack", "--silent", f"axe-core@{AXE_VERSION}"]
            done = subprocess.run(command, cwd=scratch, capture_output=True, text=True, timeout=120, check=False)
            if done.returncode != 0:
                pytest.skip(f"npm could not fetch axe-core: {done.stderr.strip()[-200:]}")
            with tarfile.open(next(Path(scratch).glob("*.tgz"))) as archive:
                member = archive.extractfile("package/axe.min.js")
                assert member is not None
                whole = Path(scratch) / "axe.min.js"
                whole.write_bytes(member.read())
            shutil.copy(whole, script.with_suffix(f".{os.getpid()}"))
            script.with_suffix(f".{os.getpid()}").replace(script)  # in one step: another worker may be reading
    return script.read_text(encoding="utf-8")


def serious_violations(browser: "Chrome") -> list[str]:
    """Return the accessibility violations that axe-core calls serious or critical, one line each."""
    # evaluated through the debugger: the page's own policy, which forbids scripts from elsewhere, stays in force
    browser.execute_cdp_cmd("Runtime.evaluate", {"expression": axe_source()})
    found: dict[str, Any] = browser.execute_async_script(
        "const done = arguments[0];"
        "axe.run(document, {resultTypes: ['violations']}).then(done, (e) => done({error: String(e)}))"
    )
    assert "error" not in found, found
    return [
        f"{violation['id']}: {node['target']} {node['failureSummary']}"
        for violation in found["violations"]
        if violation["impact"] in ("serious", "critical")
        for node in violation["nodes"]
    ]
