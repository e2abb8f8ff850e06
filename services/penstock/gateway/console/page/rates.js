// What was done of late, from what members count since their start.

const KEPT_S = 300;
const OVER_S = 4;
export const SOURCES = ["worker", "gpu", "host", "nvme", "remote", "computed"];

function counters(worker) {
  const { prompt_tokens: prompt } = worker;
  const cached = SOURCES.slice(0, -1).reduce((sum, source) => sum + prompt[source], 0);
  const fetched = cached - prompt.worker;
  return { computed: prompt.computed, cached, fetched, generated: worker.generated_tokens,
    drafted: worker.drafted_tokens, accepted: worker.accepted_tokens, prompts: prompt };
}

const NAMES = ["computed", "cached", "fetched", "generated", "drafted", "accepted"];

/** Frames of the last minutes. */
export class History {
  constructor() {
    this.points = [];
  }

  add(frame, at) {
    const workers = new Map(frame.workers.map((one) => [one.id, { ...counters(one), queue_s: one.queue_s }]));
    this.points.push({ at, workers });
    while (this.points.length > 2 && at - this.points[0].at > KEPT_S) this.points.shift();
    this.points.at(-1).rates = this.#rates(this.points.length - 1);
  }

  /** Of each worker, per second, over the last seconds; of one that has been started again meanwhile, nothing. */
  get rates() {
    return this.points.at(-1)?.rates ?? { workers: new Map(), total: none() };
  }

  #rates(last) {
    const now = this.points[last];
    let first = last;
    while (first > 0 && now.at - this.points[first].at < OVER_S) first -= 1;
    const before = this.points[first];
    const span = now.at - before.at;
    const total = none();
    const workers = new Map();
    for (const [id, here] of now.workers) {
      const there = before.workers.get(id);
      const own = none();
      for (const name of NAMES) {
        own[name] = span > 0 && there ? Math.max(0, here[name] - there[name]) / span : 0;
        total[name] += own[name];
      }
      workers.set(id, own);
    }
    return { workers, total };
  }
}

function none() {
  return Object.fromEntries(NAMES.map((name) => [name, 0]));
}
