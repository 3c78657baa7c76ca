// The first page: step through a race, write the line that is missing, run it. And the tracks, with what has been passed.
"use strict";
{
  const root = document.querySelector(".stage"),
    stage = new Stage(root);
  const help = root.querySelector("[data-do=help]"),
    after = root.querySelector(".stage-after");
  const FIX = "        cuda.syncthreads()",
    prompt = stage.said.textContent;
  stage.first = JSON.parse(root.querySelector("script[type='application/json']").textContent);
  stage.first.data = stage.data;
  let playing = false; // the fixed kernel plays once, unasked
  stage.frame.addEventListener("load", () => {
    if (playing) stage.frame.contentDocument.getElementById("play").click();
    playing = false;
  });
  const gap = () =>
    stage.field.value
      .split("\n")
      .findIndex((line, i, all) => !line.trim() && /right =/.test(all[i - 1])) + 1;
  root.addEventListener("step", (event) => {
    if (event.detail.bad.length) stage.say("bad", stage.result?.error || stage.first.error);
    else if (!stage.result?.error && stage.result) return;
    else stage.say("", prompt);
    help.hidden &&= !event.detail.bad.length || !gap();
  });
  help.addEventListener("click", () => {
    if (gap()) stage.field.write(gap(), FIX);
    help.hidden = true;
  });
  root.addEventListener("edit", () => stage.say("", "Now run it."));
  root.addEventListener("shown", (event) => {
    const passed = event.detail && !event.detail.error;
    after.hidden = !passed;
    if (!passed) return;
    help.hidden = true;
    stage.say("good", "No race. 64 threads, four turns, every access checked.");
    if (matchMedia("(prefers-reduced-motion: no-preference)").matches) playing = true;
  });

  // What the exercises' cells have kept of the reader's progress.
  const items = [...document.querySelectorAll(".track li")],
    exercises = (item) => item.dataset.exercises.split(" ");
  import("./storage.js")
    .then(({ passed, watch }) => {
      const show = () => showProgress(passed());
      watch("", () => {}, show);
      show();
    })
    .catch(() => {}); // a page that was opened from a file has no modules: it shows no progress

  function showProgress(done) {
    const complete = (item) => exercises(item).every((number) => done.has(number));
    for (const item of items) {
      item.className = complete(item)
        ? "passed"
        : exercises(item).some((number) => done.has(number))
          ? "begun"
          : "";
      item.querySelector("a").setAttribute("aria-description", item.className);
    }
    for (const track of document.querySelectorAll(".track")) {
      const lessons = [...track.querySelectorAll("li")],
        count = lessons.filter(complete).length;
      track.querySelector("progress").value = count;
      if (count)
        track.querySelector(".track-done span").textContent =
          `${count} of ${lessons.length} lessons`;
      lessons.find((item) => !complete(item))?.classList.add("next");
      if (track.querySelector("details .next")) track.querySelector("details").open = true;
    }
    const last = items.findLast((item) => item.matches(".passed, .begun"))?.closest(".track"),
      next = last?.querySelector(".next a");
    if (next)
      Object.assign(document.querySelector(".starts .start"), {
        href: next.href,
        textContent: `Continue with lesson ${next.querySelector("b").textContent}`,
      });
  }
}
