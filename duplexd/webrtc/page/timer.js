// A worker that only counts time. A page in the background has its own timers held back to one a second; a worker's
// are not, and unmuting 900 ms late would swallow the beginning of a reply.

const handles = new Map();

onmessage = ({ data }) => {
  if (data.stop) {
    clearInterval(handles.get(data.id));
    handles.delete(data.id);
  } else if (data.every) {
    handles.set(data.id, setInterval(() => postMessage(data.id), data.every));
  } else {
    handles.set(data.id, setTimeout(() => { handles.delete(data.id); postMessage(data.id); }, data.after));
  }
};
