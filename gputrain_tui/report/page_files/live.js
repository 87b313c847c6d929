"use strict";
// Shows newer data of a run that is served, except while a reader drags.
const stream = new EventSource(location.pathname + "/events");
stream.addEventListener("message", (event) => {
  if (!view.isDragging) show(JSON.parse(event.data));
});
