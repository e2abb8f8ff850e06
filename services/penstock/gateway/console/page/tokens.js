// Tokens as text: a character may be the bytes of several.

// The characters that byte-level tokenizers write for bytes that are no letters.
const BYTES = new Map();
for (let byte = 0, next = 256; byte < 256; byte += 1) {
  const plain = (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
  BYTES.set(String.fromCodePoint(plain ? byte : next++), byte);
}

/** What each of the tokens adds to the text; `pieces` has the bytes of each. */
export class TextOfBytes {
  constructor() {
    this.decoder = new TextDecoder();
  }

  add(piece) {
    return this.decoder.decode(Uint8Array.from(piece), { stream: true });
  }
}

/** The texts of a prompt's tokens, as the tokenizer writes them. */
export function textsOf(names) {
  const bytes = new TextOfBytes();
  const byteLevel = names.some((name) => name && /[ĠĊ]/.test(name)) || names.every((name) => !name || [...name].every((one) => BYTES.has(one)));
  return names.map((name) => {
    if (name === null) return "\ufffd";
    if (byteLevel && [...name].every((one) => BYTES.has(one))) return bytes.add([...name].map((one) => BYTES.get(one)));
    return name.replaceAll("\u2581", " ");
  });
}
