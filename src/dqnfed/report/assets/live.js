const RETRY_MS = 1000;

/** Keeps the page up to date with a run in progress: the server says when something changed, the page then asks for it. */
function startLive(views) {
  const token = new URLSearchParams(location.search).get("token");
  const status = document.getElementById("live");
  status.hidden = false;
  let asking = false;
  let again = false;
  const ask = async () => {
    if (asking) {
      again = true;
      return;
    }
    asking = true;
    try {
      const answer = await fetch(`data?token=${encodeURIComponent(token)}`);
      if (!answer.ok) throw new Error(`the server answered ${answer.status}`);
      show(await answer.json());
    } catch (error) {
      status.textContent = `Not up to date: ${error.message}`;
    }
    asking = false;
    if (again) {
      again = false;
      ask();
    }
  };
  const show = (news) => {
    if (news.charts.length !== views.length) {
      location.reload();
      return;
    }
    for (const [name, text] of Object.entries(news.parts)) {
      const element = document.querySelector(`[data-live="${name}"]`);
      if (element && element.innerHTML !== text) element.innerHTML = text;
    }
    document.querySelectorAll(".experiment").forEach(applyWeight);
    news.charts.forEach((data, i) => views[i].update(data));
    status.textContent = news.status;
    document.documentElement.dataset.stamp = news.stamp;
  };
  const listen = () => {
    const events = new EventSource(`events?token=${encodeURIComponent(token)}`);
    events.onmessage = ask;
    events.onerror = () => {
      status.textContent = "Connection lost; trying again";
      events.close();
      setTimeout(listen, RETRY_MS);
    };
  };
  listen();
}
