// The newest of many lines.

const MOST_CHARACTERS = 24_000_000; // and never more text than that in a ring

/** The newest of many lines: at most so many, and not more than so many characters. */
export class RingBuffer {
  constructor(most, characters = MOST_CHARACTERS) {
    this.most = most;
    this.characters = characters;
    this.items = [];
    this.first = 0;
    this.length = 0;
    this.size = 0;
    this.dropped = 0;
  }

  push(line) {
    if (this.length === this.most) this.drop();
    this.items[(this.first + this.length) % this.most] = line;
    this.length++;
    this.size += line.text.length;
    while (this.size > this.characters && this.length > 1) this.drop();
  }

  drop() {
    this.size -= this.at(0).text.length;
    this.items[this.first] = undefined;
    this.first = (this.first + 1) % this.most;
    this.length--;
    this.dropped++;
  }

  at(i) {
    return this.items[(this.first + i) % this.most];
  }
}
