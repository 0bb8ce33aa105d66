// A page of file: may not start a worker. The theme's search is one: here it runs in a hidden frame of the page.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    #inner
    #waiting = []

    constructor(address) {
      super()
      const frame = document.body.appendChild(document.createElement("iframe"))
      frame.hidden = true
      const inner = frame.contentWindow
      inner.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      const script = inner.document.createElement("script")
      script.src = new URL(address, location.href)
      script.onload = () => {
        this.#inner = inner
        for (const data of this.#waiting) this.postMessage(data)
      }
      inner.document.head.append(script)
    }

    postMessage(data) {
      if (this.#inner) this.#inner.dispatchEvent(new MessageEvent("message", { data }))
      else this.#waiting.push(data)
    }
  }
}
