// The run's progress in the title of the browser's tab, before what stands there.

const OURS = /^\u2800[^\u2800]*\u2800 /; // between blank signs, so that it is found again

export class TabTitle {
  constructor() {
    this.text = "";
  }

  /** Shows a text, or with none the page's own title; a notebook that writes its title anew has it put before that, too. */
  show(text) {
    if (!text && !this.text) return;
    this.text = text;
    const own = document.title.replace(OURS, "");
    const title = text ? `\u2800${text}\u2800 ${own}` : own;
    if (document.title !== title) document.title = title;
  }
}
