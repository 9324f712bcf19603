"""A headless Chromium for the tests of pages, started once in a process."""

import shutil
from contextlib import contextmanager

import numpy as np
import pytest

running = []  # the Chromium of this process, after the first test that needs it


def chromium():
    """Return the running Chromium, or start it; skip the test if it is not installed."""
    if running:
        return running[0]
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
    running.append(webdriver.Chrome(options=options, service=webdriver.ChromeService(driver)))
    return running[0]


def quit_browser():
    """Stop the Chromium of this process."""
    while running:
        running.pop().quit()


@contextmanager
def browser(width=1300, height=1500, *, dark=False):
    """Open a tab with a screen of this size, without messages of earlier pages, and close all tabs afterwards."""
    opened = chromium()
    empty = opened.current_window_handle
    opened.switch_to.new_window("tab")
    try:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        opened.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        opened.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        yield opened
    finally:
        for tab in set(opened.window_handles) - {empty}:
            opened.switch_to.window(tab)
            opened.close()
        opened.switch_to.window(empty)
        opened.get_log("browser")  # removes the messages


def contrast(one, other):
    """Return the contrast ratio of two colours such as rgb(1, 2, 3); WCAG 2.2 requires at least 4.5 for text."""

    def luminance(colour):
        parts = np.array([int(part) for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]) / 255
        return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4) @ [0.2126, 0.7152, 0.0722]

    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)
