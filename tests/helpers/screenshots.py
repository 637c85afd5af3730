"""Pictures of a report for the documentation: `python -m tests.helpers.screenshots REPORT.html OUT NAME`."""

import base64
import io
import sys
from pathlib import Path

from PIL import Image

from tests.helpers.browser import chromium, open_page

VIEWS = {  # name: width, height, dark
    "desktop": (1280, 1600, False),
    "desktop-dark": (1280, 1600, True),
    "phone": (360, 1600, False),
    "phone-dark": (360, 1600, True),
}


def write_screenshots(report: Path, out: Path, name: str) -> list[Path]:
    """Write one picture per view, from the top of the page, in few colours: small files, sharp text."""
    out.mkdir(parents=True, exist_ok=True)
    paths = []
    with chromium() as browser:
        for view, (width, height, dark) in VIEWS.items():
            open_page(browser, report.resolve().as_uri(), width=width, height=height, dark=dark)
            shot = browser.execute_cdp_cmd("Page.captureScreenshot", {"format": "png"})
            image = Image.open(io.BytesIO(base64.b64decode(shot["data"]))).convert("RGB")
            paths.append(out / f"{name}-{view}.png")
            image.quantize(96).save(paths[-1], optimize=True)
    return paths


if __name__ == "__main__":
    write_screenshots(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
