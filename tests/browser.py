"""A headless Chromium for the tests of pages."""

import shutil
from contextlib import contextmanager

import numpy as np
import pytest


@contextmanager
def browser(width=1300, height=1500, *, dark=False):
    """Open a headless Chromium with a screen of this size; skip the test if it is not installed."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    binary = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    driver = shutil.which("chromedriver")
    if not binary or not driver:
        pytest.skip("there is no Chromium with a chromedriver: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    opened = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    try:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        opened.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        opened.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        yield opened
    finally:
        opened.quit()


def contrast(one, other):
    """Return the contrast ratio of two colours such as rgb(1, 2, 3); WCAG 2.2 requires at least 4.5 for text."""

    def luminance(colour):
        parts = np.array([int(part) for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]) / 255
        return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4) @ [0.2126, 0.7152, 0.0722]

    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)
