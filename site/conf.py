"""How Sphinx turns README.md, the lessons and the glossary into the pages of `make site`. It runs nothing."""

import json
import re
import shutil

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml

project = html_title = "The ladder of GPU kernels"
extensions = ["myst_nb"]
root_doc = "README"
include_patterns = ["*.md", "notebooks/*", "workshop/*.md"]
exclude_patterns = [".*", "work", "build", "labs", "solutions", "helpers", "tests", "site", "**/.ipynb_checkpoints"]

nb_execution_mode = "off"
nb_ipywidgets_js = {}  # they would come from elsewhere; a static figure stands beside every widget
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4

html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_js_files = ["site.js"]
html_copy_source = html_show_sourcelink = html_use_index = False
html_math_renderer = "mathml"
pygments_style, pygments_dark_style = "a11y-high-contrast-light", "a11y-high-contrast-dark"


def place(name):
    """Where a page stands in the sidebar: lessons by their numbers (12 before 12_2), the glossary, the rest."""
    return not name.startswith("notebooks/"), [int(number) for number in re.findall(r"\d+(?=_)", name)] or [99], name


def adapt(app, docname, source):
    """Name the pages for the sidebar, on the front page; link to a lab as a download, and to a cell by its id."""
    source[0] = re.sub(r"\]\(((?:\.\./)?labs/)", r"](path:\1", source[0]).replace(".ipynb#cell-id=", ".html#")
    if docname == root_doc:
        pages = sorted(app.env.found_docs - {root_doc}, key=place)
        source[0] += "\n".join(["", "```{toctree}", ":hidden:", ":titlesonly:", *pages, "```", ""])


def keep_one_title(app, doctree):
    """A lesson may have parts with headings as large as its title; on a page, and in the sidebar, it has one title."""
    title, *parts = [node for node in doctree.children if isinstance(node, nodes.section)]
    for part in parts:
        doctree.remove(part)
        title.append(part)


def name_cells_and_figures(app, doctree):
    """Give a code cell its id, and a figure the description that was saved with it (show.Picture)."""
    found = [node for node in doctree.findall(nodes.container) if node.get("nb_element") == "cell_code"]
    cells = json.loads(app.env.doc2path(app.env.docname).read_text())["cells"] if found else []
    for node in found:
        cell = cells[node["cell_index"]]
        node["ids"].append(cell["id"])
        figures = [
            output["metadata"]["image/png"] for output in cell["outputs"] if "image/png" in output.get("data", {})
        ]
        for image, figure in zip(node.findall(nodes.image), figures, strict=True):
            image["alt"] = figure["alt"]


def math(self, node):
    """A formula as MathML, which browsers draw by themselves."""
    block = isinstance(node, nodes.math_block)
    drawn = tex2mathml(node.astext(), as_block=block)
    self.body.append(f'<div class="formula">{drawn}</div>' if block else drawn)
    raise nodes.SkipNode


def name_language(app, name, template, context, doctree):
    """So that a screen reader speaks Chinese where it should."""
    if name == "README.zh":
        context["body"] = f'<div lang="zh-Hans">{context["body"]}</div>'


def name_front_page(app, failure):
    """A server shows index.html first."""
    if not failure:
        shutil.copy(app.outdir / "README.html", app.outdir / "index.html")


def setup(app):
    app.connect("source-read", adapt)
    app.connect("doctree-read", keep_one_title, priority=400)  # before Sphinx notes the headings
    app.connect("doctree-read", name_cells_and_figures)
    app.connect("html-page-context", name_language)
    app.connect("build-finished", name_front_page)
    app.add_html_math_renderer("mathml", (math, None), (math, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
