// Renders /status. Everything goes in as text (textContent), so nothing needs escaping.
'use strict';
const tone = { ready: 'good', live: 'good', loaded: 'good', ok: 'good', degraded: 'warn',
  suspect: 'warn', connecting: 'warn', awaited: 'warn', draining: 'warn', ejected: 'bad',
  'no-h2': 'bad', failed: 'bad' };
const list = value => Array.isArray(value) ? value : [];
const shown = value => value === undefined || value === null ? ''
  : typeof value === 'object' ? JSON.stringify(value) : String(value);

function table(id, heads, rows) {
  const table = document.createElement('table');
  const add = (row, tag, value) => {
    const cell = row.appendChild(document.createElement(tag));
    cell.textContent = shown(value);
    const colour = tag === 'td' && Object.hasOwn(tone, cell.textContent) && tone[cell.textContent];
    if (colour) cell.className = colour;
  };
  const head = table.createTHead().insertRow();
  heads.forEach(text => add(head, 'th', text));
  const body = table.createTBody();
  rows.forEach(row => { const line = body.insertRow(); row.forEach(value => add(line, 'td', value)); });
  document.getElementById(id).replaceChildren(table);
}

function connections(all) {
  const counts = {};
  list(all).forEach(c => { counts[c.state] = (counts[c.state] || 0) + 1; });
  return Object.entries(counts).map(([state, n]) => `${n} ${state}`).join(', ');
}

const best = all => {
  const rtts = list(all).map(c => c.rtt_ms).filter(Number.isFinite);
  return rtts.length ? `${Math.min(...rtts).toFixed(1)} ms` : '';
};
const sum = (all, key) => list(all).reduce((total, c) => total + (Number(c[key]) || 0), 0);

function render(status) {
  document.getElementById('version').textContent = shown(status.version);
  document.getElementById('note').textContent =
    `up since ${shown(status.started_at)} · as of ${new Date().toLocaleTimeString()}`;
  table('listeners', ['listener', 'bind', 'mode', 'upstream', 'connections', 'identities'],
    list(status.listeners).map(l => [l.name, list(l.bind).join(', ') || l.bind, l.mode, l.upstream,
      l.connections, list(l.identities).map(i =>
        `${shown(i.subject) || shown(i.cert_file)} (${shown(i.state)}${i.error ? ': ' + shown(i.error) : ''})`).join('; ')]));
  table('endpoints',
    ['upstream', 'endpoint', 'state', 'since', 'reason', 'connections', 'streams', 'watches', 'rtt', 'last ejection'],
    list(status.upstreams).flatMap(u => list(u.endpoints).map(e => [u.name, e.address, e.state,
      e.since, e.reason, connections(e.connections), sum(e.connections, 'streams'),
      sum(e.connections, 'watches'), best(e.connections),
      e.last_ejection ? `${shown(e.last_ejection.at)} ${shown(e.last_ejection.reason)}` : ''])));
}

async function turn() {
  try {
    const answer = await fetch('/status', { cache: 'no-store' });
    if (!answer.ok) throw new Error(`/status answered ${answer.status}`);
    render(await answer.json());
  } catch (error) {
    document.getElementById('note').textContent = `no news: ${error.message}`;
  }
  setTimeout(turn, 2000);
}
turn();
