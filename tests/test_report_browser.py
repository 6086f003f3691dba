"""The HTML report in a real browser: it opens without an error, and every section answers to keys and clicks."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from planner.inspection.memory_curves import memory_curves
from planner.inspection.simulated_step import simulated_step
from tests.test_inspection import plan_of

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None, reason="no chromium and chromedriver: make test installs them where it can"
)
#: Generous: a machine may be ten times slower.
PATIENCE = 600
OFFLINE = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
           "--disable-background-networking", "--disable-component-update")  # fmt: skip


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for argument in OFFLINE:
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(str(DRIVER)))
    driver.set_page_load_timeout(PATIENCE)
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def page(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The report of a pipelined plan, drawn."""
    from selenium.webdriver.support.ui import WebDriverWait

    path: Path = tmp_path_factory.mktemp("report") / "plan.html"
    plan_of("1f1b").report(path, device_hour_price=2.0, source="# layers.0\nw.up.weight\nw.down.weight")
    browser.get(path.as_uri())
    WebDriverWait(browser, PATIENCE).until(
        lambda driver: driver.execute_script(
            "return Bokeh.documents.length > 0 && Bokeh.documents.every(d => d.is_idle)"
        )
    )
    return browser


def errors(page: Any) -> list[Any]:
    return [entry for entry in page.get_log("browser") if entry["level"] == "SEVERE"]


def test_every_section_is_reached_from_the_top_without_an_error(page: Any) -> None:
    from selenium.webdriver.common.by import By

    for link in page.find_elements(By.CSS_SELECTOR, "nav a"):
        link.click()
        section = page.find_element(By.CSS_SELECTOR, "#" + link.get_attribute("href").rpartition("#")[2])
        assert section.is_displayed() and section.find_element(By.TAG_NAME, "h2").text
    for summary in page.find_elements(By.CSS_SELECTOR, "main > section > details > summary"):
        page.execute_script("arguments[0].scrollIntoView()", summary)
        summary.click()
    assert errors(page) == []


def test_charts_are_drawn(page: Any) -> None:
    """Waterfall, pipeline, memory and cluster; Bokeh draws in shadow trees."""
    heights = page.execute_script(
        "return [...document.querySelectorAll('.chart')].map(chart => chart.getBoundingClientRect().height)"
    )
    assert len(heights) == 4 and min(heights) > 80


def test_a_rank_is_chosen_whose_memory_is_shown(page: Any) -> None:
    from selenium.webdriver.common.by import By

    shown = "Bokeh.documents.map(d => d.get_model_by_name('memory')).filter(d => d)[0].data.gradients[0]"
    seen = []
    for rank in page.find_elements(By.CSS_SELECTOR, "#rank option"):
        rank.click()
        seen.append(page.execute_script(f"return {shown}"))
    curves = memory_curves(plan_of("1f1b"), simulated_step(plan_of("1f1b")))
    assert seen == pytest.approx([curve.parts["gradients"][0] / 2**30 for curve in curves], rel=1e-6)
    assert errors(page) == []


def test_a_module_that_is_opened_is_marked_in_the_program(page: Any) -> None:
    page.execute_script("document.querySelector('details.module[data-text=\"layers.0.down\"] > summary').click()")
    marked = page.execute_script("return [...document.querySelectorAll('pre .hit')].map(line => line.textContent)")
    assert marked == ["w.down.weight\n"]


def test_the_search_shows_what_it_finds_and_hides_the_rest(page: Any) -> None:
    from selenium.webdriver.common.by import By

    box = page.find_element(By.ID, "search")
    page.execute_script("arguments[0].scrollIntoView()", box)
    box.send_keys("layers.2.up")
    shown = [entry for entry in page.find_elements(By.CSS_SELECTOR, "details.module") if entry.is_displayed()]
    assert "layers.0.up" in {entry.get_attribute("data-text") for entry in shown}
    assert "layers.0.down" not in {entry.get_attribute("data-text") for entry in shown}
    assert "of the copies that are shown" in page.find_element(By.ID, "hits").text
    box.clear()
    box.send_keys("no such thing")
    assert page.find_element(By.ID, "hits").text == "0 rows"
    box.clear()
    box.send_keys(" ")
    assert page.find_element(By.CSS_SELECTOR, "details.module").is_displayed()


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_nothing_is_wider_than_the_window(page: Any, width: int, theme: str) -> None:
    page.set_window_size(width, 800)
    page.execute_script(f"document.documentElement.dataset.theme = '{theme}'; paintCharts()")
    overflow = page.execute_script("return document.documentElement.scrollWidth - document.documentElement.clientWidth")
    assert overflow <= 0
    colours = page.execute_script("const s = getComputedStyle(document.body); return [s.color, s.backgroundColor]")
    assert colours[0] != colours[1]
    assert errors(page) == []
