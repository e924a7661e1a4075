// Rows of attention from the arrays in the page. What is stored, and why, is said in tra/report/packing.py.

const KINDS = {
  float64: Float64Array,
  float32: Float32Array,
  uint8: Uint8Array,
};
const ROWS_KEPT = 600;

function decoded(base64) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(base64).buffer;
  const text = atob(base64);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  return bytes.buffer;
}

function reader(buffer) {
  return (place) => (place ? new KINDS[place.type](buffer, place.at, place.length) : null);
}

class Layer {
  constructor(packed, length, read) {
    this.heads = packed.heads;
    this.length = length;
    this.error = packed.error;
    this.others = packed.others;
    this.small = read(packed.small);
    this.gates = read(packed.gates);
    this.weights = read(packed.weights);
    this.query = read(packed.query);
    this.key = read(packed.key);
    this.scale = packed.scale;
    // One number, or one for each query of each head.
    this.threshold = typeof packed.threshold === "number" ? packed.threshold : read(packed.threshold);
    this.logGate = read(packed.log_gate);
    this.byDistance = read(packed.by_distance);
    this.byKey = read(packed.by_key);
    this.rows = new Map();
  }

  get hasScores() { return this.query !== null; }
  get hasDistance() { return this.logGate !== null && this.gates !== null; }
  keepsSome(head) { return this.threshold !== null || this.heads[head].kept < 1; }
  limit(head, query) {
    return typeof this.threshold === "number" ? this.threshold : this.threshold[head * this.length + query];
  }
  gate(head, token) { return this.gates === null ? null : this.gates[head * this.length + token]; }

  // Of a query: scores, whether each key is kept, its distance among the keys kept, and its weight.
  row(head, query) {
    const place = head * this.length + query;
    let found = this.rows.get(place);
    if (!found) {
      found = this.computed(head, query);
      if (this.rows.size >= ROWS_KEPT) this.rows.delete(this.rows.keys().next().value);
      this.rows.set(place, found);
    }
    return found;
  }

  computed(head, query) {
    const scores = this.hasScores ? this.scores(head, query) : null;
    if (this.weights) return this.stored(head, query, scores);
    const kept = new Uint8Array(query + 1).fill(1);
    if (this.threshold !== null) {
      const limit = this.limit(head, query);
      for (let key = 0; key <= query; key++) kept[key] = scores[key] > limit ? 1 : 0;
    }
    const distance = this.distances(kept);
    const logits = new Float64Array(query + 1);
    const gate = this.logGate ? this.logGate[head * this.length + query] : 0;
    const offset = (array) => (head % (array.length / this.length)) * this.length;
    let nearer = 0;
    let most = -Infinity;
    for (let key = query; key >= 0; key--) {
      let logit = scores[key];
      if (this.byDistance) logit += this.byDistance[offset(this.byDistance) + query - key];
      if (this.byKey) logit += this.byKey[offset(this.byKey) + key];
      logits[key] = logit + gate * nearer;
      nearer += kept[key];
      if (kept[key] && logits[key] > most) most = logits[key];
    }
    const exact = logits.map((logit, key) => (kept[key] ? Math.exp(logit - most) : 0));
    const total = exact.reduce((sum, weight) => sum + weight, 0);
    const weights = Float32Array.from(exact, (weight) => (total > 0 ? weight / total : 0));
    return { scores, kept, distance, weights };
  }

  // How many keys are kept from each of them to the query.
  distances(kept) {
    if (!this.hasDistance) return null;
    const found = new Int32Array(kept.length);
    let count = 0;
    for (let key = kept.length - 1; key >= 0; key--) found[key] = count += kept[key];
    return found;
  }

  stored(head, query, scores) {
    const start = (head * this.length * (this.length + 1)) / 2 + (query * (query + 1)) / 2;
    const weights = this.weights.subarray(start, start + query + 1);
    const kept = Uint8Array.from(weights, (weight) => (weight !== 0 ? 1 : 0));
    return { scores, kept, distance: this.distances(kept), weights };
  }

  scores(head, query) {
    const heads = this.heads.length;
    const width = this.query.length / (heads * this.length);
    const keyHeads = this.key.length / (width * this.length);
    const keyHead = Math.floor((head * keyHeads) / heads);
    const own = (head * this.length + query) * width;
    const scores = new Float64Array(query + 1);
    for (let key = 0; key <= query; key++) {
      const other = (keyHead * this.length + key) * width;
      let sum = 0;
      for (let d = 0; d < width; d++) sum += this.query[own + d] * this.key[other + d];
      scores[key] = sum * this.scale;
    }
    return scores;
  }
}
