// @openai/agents-realtime over a WebSocket: three spoken turns, the first reply interrupted. Prints one JSON.
import { RealtimeAgent, RealtimeSession, OpenAIRealtimeWebSocket } from '@openai/agents-realtime';

const [url, seconds] = [process.argv[2], Number(process.argv[3] ?? 22)];
const transport = new OpenAIRealtimeWebSocket({ url: `${url}/v1/realtime?model=clock`, useInsecureApiKey: true });
const agent = new RealtimeAgent({ name: 'guide', instructions: 'Be brief.' });
const session = new RealtimeSession(agent, { transport, config: { audio: { input: { turnDetection: { type: 'server_vad' } } } } });
const started = Date.now();
const out = { rate: 24000, audio: [], events: [], errors: [], interrupted: [], truncated: [], told: [], remembered: [] };
// What the client itself reports of its ear is seen where it leaves.
const send = transport.sendEvent.bind(transport);
transport.sendEvent = (event) => {
  if (event.type === 'conversation.item.truncate') out.truncated.push([event.item_id, event.audio_end_ms]);
  send(event);
};
session.on('error', (e) => out.errors.push(JSON.stringify(e)));
transport.on('*', (e) => {
  if (e.type === 'response.output_audio_transcript.delta') out.told.push([e.item_id, e.delta]);
  if (e.type === 'conversation.item.retrieved') {
    const text = (e.item.content ?? []).map((c) => c.transcript ?? '').join(' ');
    out.remembered.push({ id: e.item.id, role: e.item.role, text });
  }
  if (!e.type.endsWith('.delta')) out.events.push([Date.now() - started, e.type]);
});
transport.on('audio', (e) => out.audio.push([Date.now() - started, e.responseId, Buffer.from(e.data).toString('base64')]));
session.on('audio_interrupted', () => out.interrupted.push(Date.now() - started));
await session.connect({ apiKey: 'x' });

// Sound every 20 ms: silence, and a tone while somebody "speaks".
const turns = [[1000, 1600], [4500, 5400], [13500, 14100]];
let sent = 0;
await new Promise((resolve) => {
  const timer = setInterval(() => {
    const now = Date.now() - started;
    while (sent * 20 < now) {
      const at = sent * 20;
      const loud = turns.some(([a, b]) => at >= a && at < b);
      const pcm = new Int16Array(480);
      for (let i = 0; i < 480; i++) pcm[i] = loud ? 8000 * Math.sin((2 * Math.PI * 700 * (at * 24 + i)) / 24000) : 20 * (i % 2);
      session.sendAudio(pcm.buffer);
      sent += 1;
    }
    if (now > seconds * 1000) { clearInterval(timer); resolve(); }
  }, 10);
});
out.history = session.history.map((item) => ({
  id: item.itemId, role: item.role, status: item.status,
  text: (item.content ?? []).map((c) => c.transcript ?? c.text ?? '').join(' '),
}));
out.remembered.length = 0; // Now for all, not only those the client asked for itself.
for (const item of out.history) transport.sendEvent({ type: 'conversation.item.retrieve', item_id: item.id });
await new Promise((resolve) => setTimeout(resolve, 500));
session.close();
process.stdout.write(`${JSON.stringify(out)}\n`, () => process.exit(0)); // A pipe takes it in parts.
