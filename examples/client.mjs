// The same cart and pole in JavaScript: node examples/client.mjs tcp://127.0.0.1:5555 [environments] [steps]
// npm install zeromq @msgpack/msgpack; docs/protocol.md says the rest
import { randomBytes } from "node:crypto"
import { hostname } from "node:os"
import { Dealer } from "zeromq"
import { decode, encode } from "@msgpack/msgpack"

const [address, count = "8", steps = "1e9"] = process.argv.slice(2)
const E = Number(count), token = randomBytes(16), carts = []
for (let i = 0; i < E; i++) carts.push({ s: [0, 0, 0, 0], length: 0, over: true })

// What the protocol calls a step: the row after an episode's last one is the next one's first. Frames are little-endian, as x86 and ARM are.
function rows(actions) {
  const obs = new Float32Array(4 * E), reward = new Float32Array(E), flags = new Uint8Array(4 * E)
  const returns = new Float64Array(E), lengths = new BigInt64Array(E)
  let ended = false
  carts.forEach((cart, i) => {
    const first = cart.over
    if (first) {
      cart.s = [0, 0, 0, 0].map(() => Math.random() * 0.1 - 0.05)
      cart.length = 0
    } else {
      const [x, v, angle, spin] = cart.s, cos = Math.cos(angle), sin = Math.sin(angle)
      const pull = ((actions[i] === 1n ? 10 : -10) + 0.05 * spin ** 2 * sin) / 1.1
      const turn = (9.8 * sin - cos * pull) / (0.5 * (4 / 3 - (0.1 * cos ** 2) / 1.1))
      cart.s = [x + 0.02 * v, v + 0.02 * (pull - (0.05 * turn * cos) / 1.1), angle + 0.02 * spin, spin + 0.02 * turn]
      cart.length++
      reward[i] = 1
    }
    const fell = !first && (Math.abs(cart.s[0]) > 2.4 || Math.abs(cart.s[2]) > 0.2095)
    const late = !first && !fell && cart.length >= 500
    cart.over = fell || late
    ended ||= cart.over
    obs.set(cart.s, 4 * i)
    flags.set([fell, late, first, 0], 4 * i)
    returns[i] = cart.length // each step paid 1
    lengths[i] = BigInt(cart.length)
  })
  const bytes = (a) => Buffer.from(a.buffer)
  return [ended, [obs, reward, flags, ...(ended ? [returns, lengths] : [])].map(bytes)]
}

const dealer = new Dealer({ receiveTimeout: 1000, linger: 200 })
const say = (t, fields = {}, frames = []) => dealer.send([Buffer.from(encode({ t, ...fields })), ...frames])
const hello = () => say("hello", { v: 1, token, spec: null, groups: [E], env: "poles.mjs", host: hostname(), pid: process.pid, evaluation: false })
let n = 0, answered = 0, sent = null
dealer.connect(address)
await hello()
for (;;) {
  let parts
  try {
    parts = await dealer.receive()
  } catch (error) { // nothing for a second: what was it that is missing?
    if (error.code !== "EAGAIN") throw error
    await (n ? say("ping", { waits: [n === answered ? 0 : n] }) : hello())
    continue
  }
  const header = decode(parts[0])
  if (header.t === "refused" && !header.retry) {
    console.error(header.error.what)
    process.exit(1)
  }
  if (["stop", "ended"].includes(header.t) || n >= Number(steps)) break
  if (header.t === "unknown") await hello()
  else if (header.t === "pong" && header.taken[0] < n) await say(...sent)
  else if ((header.t === "welcome" && !n) || (header.t === "answer" && header.n === n && n !== answered)) {
    answered = n++
    const actions = parts[1] ? new BigInt64Array(new Uint8Array(parts[1]).buffer) : []
    const [ended, frames] = rows(actions)
    sent = ["step", { g: 0, n, rtt_ns: 0, env_ns: 0, ended }, frames]
    await say(...sent)
  }
}
await say("bye")
dealer.close()
console.log(`${n} steps of ${E} carts`)
