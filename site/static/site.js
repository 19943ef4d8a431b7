// The two columns beside the text are told apart by their names.
document.querySelector(".sidebar-drawer").ariaLabel = "Pages";
document.querySelector(".toc-drawer").ariaLabel = "Sections";

// What scrolls can be reached by keyboard: some browsers skip it otherwise.
const reach = () =>
  document.querySelectorAll("pre, .cell_output, .cell_output div, .table-wrapper, .formula").forEach((box) => {
    const hidden = box.scrollWidth > box.clientWidth || box.scrollHeight > box.clientHeight;
    if (hidden && getComputedStyle(box).overflowX !== "visible") box.tabIndex = 0;
    else box.removeAttribute("tabindex");
  });
addEventListener("load", reach);
addEventListener("resize", reach);
