// Search runs in a worker, which browsers refuse to pages opened as files. There it runs in a hidden
// frame instead. Material's offline plugin would load such a script from the network; it leaves that out
// where one of this name is listed.
if (location.protocol === "file:") {
  class IFrameWorker extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.appendChild(frame)
      this.inner = frame.contentWindow
      const load = source => new Promise((done, failed) => {
        const script = this.inner.document.createElement("script")
        script.src = new URL(source, document.baseURI).href
        script.onload = done
        script.onerror = () => failed(new Error(`cannot load ${script.src}`))
        this.inner.document.body.appendChild(script)
      })
      this.inner.importScripts = async (...sources) => {
        for (const source of sources) await load(source)
      }
      this.inner.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      this.ready = load(url)
    }

    postMessage(data) {
      this.ready = this.ready.then(() => {
        this.inner.dispatchEvent(new this.inner.MessageEvent("message", { data }))
      })
    }
  }
  window.IFrameWorker = window.Worker = IFrameWorker
}
