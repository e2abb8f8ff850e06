"""Tools of everyday kinds, with the ways people ask for them.

Each entry is a table row: names, descriptions, parameters (`key|other key: kind`, `?` marks an optional
one), requests with `{key}` slots, result fields and an answer. A request that leaves out an optional
parameter leaves it out of the call. In an answer `{key}` is an argument and `{=field}` a result.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Entry:
    """One row; the first name and the first key of each parameter are the canonical ones."""

    names: tuple[str, ...]
    descriptions: tuple[str, ...]
    parameters: tuple[tuple[tuple[str, ...], str, bool, str], ...]  # keys, kind, optional, description
    requests: tuple[str, ...]
    result: tuple[tuple[str, str], ...]  # field, kind
    answer: str
    follow: tuple[str, ...] = ()


def _entry(names: str, text: str, parameters: str, requests: str, result: str, answer: str, follow: str = "") -> Entry:
    rows = []
    for row in filter(None, (r.strip() for r in parameters.split(";"))):
        head, _, description = row.partition(" - ")
        keys, _, kind = head.partition(": ")
        rows.append((tuple(keys.rstrip("?").split("|")), kind.strip(), keys.endswith("?"), description.strip()))
    fields = tuple((f.partition(": ")[0], f.partition(": ")[2]) for f in result.split("; "))
    return Entry(
        tuple(names.split()),
        tuple(text.split("|")),
        tuple(rows),
        tuple(r.strip() for r in requests.split("|")),
        fields,
        answer,
        tuple(f.strip() for f in follow.split("|")) if follow else (),
    )


ENTRIES = (
    _entry(
        "get_weather current_weather weather_lookup get_current_weather fetch_weather",
        "Get the current weather for a city.|Current weather in a place.|Look up the weather of a city.",
        "city|location|place: city - The city; unit?: unit - Unit of the temperature",
        "What is the weather in {city}?|How is the weather in {city} today?"
        "|What's the weather like in {city}?"
        "|Weather in {city}, please.|Tell me the weather in {city}."
        "|Is it raining in {city}? Check the weather."
        "|What is the weather in {city} in {unit}?|Check the weather for {city}."
        "|Can you look up the weather in {city}?"
        "|I am in {city}. What is the weather?",
        "temperature: int:-9:36; condition: condition",
        "It is {=temperature} degrees and {=condition} in {city}.",
        "And in {city}?|What about {city}?|And the weather in {city}?",
    ),
    _entry(
        "get_forecast weather_forecast forecast",
        "Get the weather forecast for the next days.|Forecast of the weather for a city and a number of days.",
        "city|location: city - The city; days|num_days: int:1:9 - Number of days",
        "What is the forecast for {city} for the next {days} days?"
        "|Give me a {days} day forecast for {city}."
        "|Forecast for {city}, {days} days.|I need the {days} day weather forecast in {city}."
        "|How will the weather be in {city} over {days} days?|{days} days forecast for {city} please.",
        "condition: condition; high: int:5:36; low: int:-9:4",
        "The forecast for {city} is {=condition}, with a high of {=high} and a low of {=low}.",
        "And for {city}?|Same for {city}.",
    ),
    _entry(
        "get_order_status order_status check_order lookup_order track_order get_order",
        "Get the status of an order.|Look up an order by its id.|Check where an order is.",
        "order_id|id|order: id - The order id",
        "Where is my order {order_id}?|What is the status of order {order_id}?"
        "|Check order {order_id} please."
        "|Can you look up order {order_id}?|Has order {order_id} shipped?|Please track my order {order_id}."
        "|My order number is {order_id}. Where is it?|I want to know about order {order_id}."
        "|Status of order {order_id}?"
        "|Look up the order {order_id}.",
        "status: state; eta: date",
        "Order {order_id} is {=status} and should arrive on {=eta}.",
        "And order {order_id}?|What about {order_id}?",
    ),
    _entry(
        "cancel_order order_cancel",
        "Cancel an order.|Cancel an order that was placed earlier.",
        "order_id|id|order: id - The order id; reason?: phrase - Why it is cancelled",
        "Cancel order {order_id}.|Please cancel my order {order_id}.|I want to cancel order {order_id}."
        "|Can you cancel order {order_id}? Reason: {reason}.|Order {order_id} should be cancelled please."
        "|Cancel the order {order_id}, please.",
        "status: =cancelled; reference: id",
        "Order {order_id} is cancelled. The reference is {=reference}.",
        "Also cancel {order_id}.|And {order_id}.",
    ),
    _entry(
        "refund_order create_refund issue_refund",
        "Refund an order.|Issue a refund for an order.",
        "order_id|order: id - The order id; amount: int:2:900 - Amount to refund",
        "Refund {amount} for order {order_id}.|Please refund order {order_id}, the amount is {amount}."
        "|I need a refund of {amount} on order {order_id}.|Issue a refund of {amount} for order {order_id}."
        "|Give me back {amount} for order {order_id}, a refund please.",
        "refund_id: id; status: state",
        "The refund of {amount} for order {order_id} is {=status}. Its id is {=refund_id}.",
    ),
    _entry(
        "track_parcel track_package parcel_status track_shipment",
        "Track a parcel by its tracking number.|Find out where a parcel is.",
        "tracking_number|number|tracking_id: id - The tracking number",
        "Where is parcel {tracking_number}?|Track parcel {tracking_number}."
        "|My tracking number is {tracking_number}."
        "|Can you track the package {tracking_number}?|Please track {tracking_number}."
        "|Where is the package with tracking number {tracking_number}?",
        "location: city; status: state",
        "The parcel {tracking_number} is in {=location} and is {=status}.",
        "And {tracking_number}?",
    ),
    _entry(
        "list_events get_events calendar_list get_calendar check_calendar",
        "List the calendar events of a day.|Show what is on the calendar on a date.",
        "date|day: date - The date",
        "What is on my calendar on {date}?|Show my events on {date}.|List the events for {date}."
        "|Do I have anything on {date}?|What do I have on {date}?|Check my calendar for {date}."
        "|Which events are on {date}?",
        "event: phrase; time: time",
        "On {date} you have {=event} at {=time}.",
        "And on {date}?|What about {date}?",
    ),
    _entry(
        "create_event add_event schedule_event calendar_create schedule_meeting create_meeting",
        "Create a calendar event.|Add a meeting to the calendar.|Schedule an event.",
        "title|name|subject: phrase - Title of the event; date|day: date - The date; time|start: time - Start time",
        "Schedule {title} on {date} at {time}.|Add {title} to my calendar on {date} at {time}."
        "|Create an event called {title} for {date} at {time}."
        "|Please put {title} on {date}, {time} in my calendar."
        "|Set up a meeting {title} at {time} on {date}.|New event: {title}, {date}, {time}."
        "|Book a meeting on {date} at {time} about {title}.",
        "event_id: id; status: =created",
        "I added {title} on {date} at {time}. The event id is {=event_id}.",
    ),
    _entry(
        "delete_event remove_event cancel_event",
        "Delete a calendar event.|Remove an event from the calendar.",
        "event_id|id: id - The event id",
        "Delete event {event_id}.|Remove the event {event_id} from my calendar."
        "|Please delete event {event_id}."
        "|Take event {event_id} off my calendar.|Cancel the event {event_id}.",
        "status: =deleted",
        "The event {event_id} is {=status}.",
    ),
    _entry(
        "send_email email_send compose_email send_mail",
        "Send an email.|Send an email to someone.",
        "to|recipient|address: email - Address of the recipient; subject|title: phrase - Subject line",
        "Send an email to {to} with the subject {subject}.|Email {to} about {subject}."
        "|Write an email to {to}, subject {subject}.|Please send {to} an email about {subject}."
        "|Mail {to}: {subject}.|I want to email {to} with subject {subject}.",
        "message_id: id; status: =sent",
        "I sent the email to {to}. The message id is {=message_id}.",
        "Send the same to {to}.|And to {to}.",
    ),
    _entry(
        "search_files find_files file_search",
        "Search for files.|Find files that match a query.",
        "query|text|pattern: word - What to search for; folder?: word - Folder to search in",
        "Find files about {query}.|Search my files for {query}.|Which files mention {query}?"
        "|Search for {query} in the folder {folder}.|Look for files with {query}."
        "|Find files named {query}.",
        "file: file; count: int:1:30",
        "I found {=count} files. The first is {=file}.",
        "And about {query}?|Now search for {query}.",
    ),
    _entry(
        "read_file open_file get_file file_read",
        "Read a file.|Return the content of a file.",
        "path|file|filename: file - Path of the file",
        "Read {path}.|What is in {path}?|Show me the content of {path}.|Open the file {path}."
        "|Please read the file {path}.|What does {path} say?",
        "content: phrase",
        "The file {path} says: {=content}.",
        "And {path}?|Now read {path}.",
    ),
    _entry(
        "delete_file remove_file",
        "Delete a file.|Remove a file.",
        "path|file|filename: file - Path of the file",
        "Delete {path}.|Please delete the file {path}.|Remove the file {path}.|Get rid of {path}."
        "|I do not need {path} any more, delete it.",
        "status: =deleted",
        "The file {path} is {=status}.",
        "And {path}.|Also {path}.",
    ),
    _entry(
        "convert_currency currency_convert exchange",
        "Convert an amount between currencies.|Convert money from one currency to another.",
        "amount: int:1:9999 - Amount of money; from_currency|source"
        "|from: currency - Currency to convert from;"
        "to_currency|target|to: currency - Currency to convert to",
        "Convert {amount} {from_currency} to {to_currency}."
        "|How much is {amount} {from_currency} in {to_currency}?"
        "|What are {amount} {from_currency} worth in {to_currency}?"
        "|{amount} {from_currency} in {to_currency}, please."
        "|I have {amount} {from_currency}. How much is that in {to_currency}?"
        "|Change {amount} {from_currency} into {to_currency}.",
        "result: number; rate: number",
        "{amount} {from_currency} is {=result} {to_currency}.",
    ),
    _entry(
        "get_time current_time time_in_city get_local_time",
        "Get the local time in a city.|Current time in a place.",
        "city|location|place: city - The city",
        "What time is it in {city}?|What is the time in {city}?|Tell me the local time in {city}."
        "|Current time in {city}?|Do you know what time it is in {city}?|Time in {city}, please.",
        "time: time; day: day",
        "It is {=time} in {city}.",
        "And in {city}?|What about {city}?",
    ),
    _entry(
        "translate_text translate",
        "Translate a text into another language.|Translate words.",
        "text: phrase - Text to translate; language|target_language|to: language - Language to translate into",
        "Translate {text} into {language}.|How do you say {text} in {language}?"
        "|What is {text} in {language}?"
        "|Please translate {text} to {language}.|Say {text} in {language}."
        "|I need {text} translated into {language}.",
        "translation: phrase",
        "In {language} it is: {=translation}.",
        "And in {language}?",
    ),
    _entry(
        "set_reminder create_reminder add_reminder remind_me",
        "Set a reminder.|Remind the user of something at a time.",
        "text|title|message: phrase - What to remind of; time|at: time - When to remind",
        "Remind me of {text} at {time}.|Set a reminder for {text} at {time}."
        "|At {time} remind me about {text}."
        "|I need a reminder at {time}: {text}.|Please remind me at {time} of {text}."
        "|Create a reminder {text} for {time}.",
        "reminder_id: id",
        "I will remind you of {text} at {time}. The reminder id is {=reminder_id}.",
    ),
    _entry(
        "set_timer start_timer",
        "Set a timer.|Start a timer for some minutes.",
        "minutes|duration: int:1:90 - Minutes",
        "Set a timer for {minutes} minutes.|Start a {minutes} minute timer."
        "|Timer for {minutes} minutes please."
        "|Count down {minutes} minutes with a timer.|I need a timer of {minutes} minutes.",
        "timer_id: id",
        "The timer is set for {minutes} minutes. Its id is {=timer_id}.",
    ),
    _entry(
        "book_table reserve_table restaurant_booking",
        "Book a table at a restaurant.|Reserve a table.",
        "restaurant|place: name - Name of the restaurant; people|guests"
        "|party_size: int:1:12 - Number of people;"
        "time: time - Time of the booking",
        "Book a table at {restaurant} for {people} people at {time}."
        "|Reserve a table for {people} at {restaurant}, {time}."
        "|I want to eat at {restaurant} with {people} people at {time}. Book a table."
        "|Table for {people} at {time} at the restaurant {restaurant}, please."
        "|Please book {restaurant} at {time} for {people} people."
        "|Get us a table at {restaurant} at {time}, we are {people}.",
        "booking_id: id; status: =confirmed",
        "The table at {restaurant} for {people} people at {time} is booked. The booking id is {=booking_id}.",
    ),
    _entry(
        "search_flights find_flights flight_search",
        "Search for flights.|Find flights between two cities on a date.",
        "origin|from|from_city: city - City of departure; destination|to|to_city: city - City of arrival;"
        "date|day: date - Date of travel",
        "Find flights from {origin} to {destination} on {date}."
        "|I want to fly from {origin} to {destination} on {date}."
        "|Search a flight to {destination} from {origin} on {date}."
        "|Flights {origin} to {destination}, {date}."
        "|Are there flights on {date} from {origin} to {destination}?"
        "|Show me flights from {origin} to {destination} for {date}.",
        "flight: id; price: int:40:990; departure: time",
        "Flight {=flight} leaves at {=departure} and costs {=price}.",
    ),
    _entry(
        "book_hotel reserve_hotel hotel_booking",
        "Book a hotel room.|Book a hotel in a city.",
        "city|location: city - The city; nights: int:1:14 - Number of nights; date|check_in?: date - Day of arrival",
        "Book a hotel in {city} for {nights} nights.|I need a hotel in {city}, {nights} nights."
        "|Reserve a hotel room in {city} for {nights} nights from {date}."
        "|Hotel in {city} for {nights} nights please."
        "|Find me a room in a hotel in {city} for {nights} nights.",
        "hotel: name; booking_id: id",
        "I booked the hotel {=hotel} in {city} for {nights} nights. The booking id is {=booking_id}.",
    ),
    _entry(
        "play_music play_song music_play",
        "Play music.|Play music by an artist.",
        "artist|name: fullname - The artist",
        "Play something by {artist}.|Play music by {artist}.|I want to hear {artist}."
        "|Put on some music by {artist}."
        "|Can you play a song of {artist}?|Music by {artist}, please.",
        "track: phrase; status: =playing",
        "Now playing {=track} by {artist}.",
    ),
    _entry(
        "set_lights control_lights switch_lights",
        "Turn the lights of a room on or off.|Control the lights.",
        "room: room - The room; on|enabled: bool - Whether the lights should be on",
        "Set the lights in the {room}, on is {on}.|Lights in the {room}: on {on}."
        "|Switch lights of the {room}, on = {on}."
        "|Make the lights in the {room} on: {on}.|For the {room}, set the lights to on {on}.",
        "status: =done",
        "The lights in the {room} are set.",
        "And the {room}.",
    ),
    _entry(
        "set_temperature set_thermostat adjust_thermostat",
        "Set the temperature of a room.|Adjust the thermostat.",
        "room: room - The room; temperature|degrees|value: int:14:28 - Degrees",
        "Set the {room} to {temperature} degrees.|Heat the {room} to {temperature} degrees."
        "|Make it {temperature} degrees in the {room}.|Set the thermostat in the {room} to {temperature}."
        "|I want {temperature} degrees in the {room}.|Temperature in the {room} to {temperature}, please.",
        "status: =done; temperature: int:14:28",
        "The {room} is set to {temperature} degrees.",
        "And the {room}.|Same for the {room}.",
    ),
    _entry(
        "get_stock_price stock_price stock_quote",
        "Get the price of a stock.|Look up a stock by its symbol.",
        "symbol|ticker: symbol - Symbol of the stock",
        "What is the stock price of {symbol}?|How is {symbol} trading?|Price of the stock {symbol}?"
        "|What does a share of {symbol} cost?|Check the stock {symbol}.|Quote for {symbol} stock please.",
        "price: number; change: number",
        "{symbol} trades at {=price}.",
        "And {symbol}?|What about {symbol}?",
    ),
    _entry(
        "find_contact get_contact contact_lookup lookup_contact",
        "Find a contact.|Look up the phone number and email of a person.",
        "name|person|contact: fullname - Name of the person",
        "What is the phone number of {name}?|Find the contact {name}.|How can I reach {name}?"
        "|Look up {name} in my contacts.|I need the number of {name}."
        "|Give me the contact details of {name}.",
        "phone: int:100000:999999; email: email",
        "The phone number of {name} is {=phone} and the email is {=email}.",
        "And {name}?",
    ),
    _entry(
        "restart_service service_restart restart_server",
        "Restart a service.|Restart a service on a host.",
        "service|name: word - Name of the service; host|server?: id - Host it runs on",
        "Restart the service {service}.|Please restart {service}.|Restart {service} on host {host}."
        "|The service {service} hangs, restart it.|Can you restart the {service} service?"
        "|Bounce {service} on {host}.",
        "status: =restarted; pid: int:100:9999",
        "The service {service} was restarted with pid {=pid}.",
        "And {service}.|Also restart {service}.",
    ),
    _entry(
        "get_server_status check_server server_status check_host",
        "Check the status of a server.|Get the health of a host.",
        "host|server|server_id: id - The server",
        "Is server {host} up?|Check the server {host}.|What is the status of server {host}?"
        "|How is the host {host} doing?|Status of the server {host} please.|Health of host {host}?",
        "status: state; load: int:1:99",
        "The server {host} is {=status} with a load of {=load}.",
        "And {host}?|What about {host}?",
    ),
    _entry(
        "deploy_service deploy deploy_version",
        "Deploy a version of a service.|Deploy a service.",
        "service|name|app: word - Name of the service; version|tag: id - Version to deploy",
        "Deploy {service} version {version}.|Roll out version {version} of {service}."
        "|Deploy version {version} to {service}."
        "|Please deploy {service} at version {version}.|Ship {service} {version}, deploy it.",
        "deployment_id: id; status: state",
        "The deployment of {service} {version} is {=status}. Its id is {=deployment_id}.",
    ),
    _entry(
        "create_ticket open_ticket new_ticket create_issue",
        "Create a support ticket.|Open a ticket.",
        "title|subject|summary: phrase - What it is about; priority: priority - Priority",
        "Open a ticket about {title} with {priority} priority.|Create a {priority} ticket: {title}."
        "|File a ticket for {title}, priority {priority}.|New ticket, {title}, {priority} priority."
        "|Please open a {priority} priority ticket called {title}."
        "|I need a ticket: {title}. Priority is {priority}.",
        "ticket_id: id",
        "I opened the ticket {=ticket_id} about {title}.",
    ),
    _entry(
        "assign_ticket ticket_assign reassign_ticket",
        "Assign a ticket to a person.|Give a ticket to someone.",
        "ticket_id|ticket|id: id - The ticket; person|assignee|user: name - Who gets it",
        "Assign ticket {ticket_id} to {person}.|Give ticket {ticket_id} to {person}."
        "|{person} should get ticket {ticket_id}."
        "|Please assign {person} to ticket {ticket_id}.|Ticket {ticket_id} goes to {person}.",
        "status: =assigned",
        "The ticket {ticket_id} is assigned to {person}.",
    ),
    _entry(
        "get_customer lookup_customer find_customer customer_lookup",
        "Look up a customer.|Find a customer by email.",
        "email|address: email - Email of the customer",
        "Who is the customer with email {email}?|Look up the customer {email}.|Find customer {email}."
        "|Which customer has the email {email}?|Get the customer for {email}.|Customer {email}, please.",
        "customer_id: id; name: fullname",
        "The customer is {=name} with id {=customer_id}.",
        "And {email}?",
    ),
    _entry(
        "add_to_cart cart_add add_item",
        "Add a product to the cart.|Put an item into the shopping cart.",
        "product|item|product_name: word - The product; quantity|count|amount: int:1:20 - How many",
        "Add {quantity} {product} to my cart.|Put {quantity} {product} into the cart."
        "|I want {quantity} {product} in my cart."
        "|Add to cart: {product}, {quantity} pieces.|Please add {quantity} of {product} to the cart."
        "|Cart: {quantity} {product}.",
        "total: number; items: int:1:40",
        "I added {quantity} {product}. The total is {=total}.",
        "And {quantity} {product}.|Also {quantity} {product}.",
    ),
    _entry(
        "get_product_price product_price price_lookup get_price",
        "Get the price of a product.|Look up what a product costs.",
        "product|item|product_name: word - The product",
        "How much is the {product}?|What does the {product} cost?|Price of the {product}?"
        "|What is the price of {product}?"
        "|Tell me the price of the {product}.|How much do you want for the {product}?",
        "price: number; currency: currency",
        "The {product} costs {=price} {=currency}.",
        "And the {product}?|What about the {product}?",
    ),
    _entry(
        "check_stock get_inventory inventory_lookup stock_level",
        "Check how many pieces of a product are in stock.|Look up the inventory of a product.",
        "product|item|sku: word - The product",
        "Do you have {product} in stock?|How many {product} are in stock?"
        "|Check the inventory for {product}."
        "|Is the {product} in stock?|Stock of {product}?|How much {product} is left in the inventory?",
        "quantity: int:0:900",
        "There are {=quantity} {product} in stock.",
        "And {product}?",
    ),
    _entry(
        "get_distance distance calculate_distance route_distance",
        "Get the distance between two cities.|Calculate how far two places are apart.",
        "origin|from|start: city - First city; destination|to|end: city - Second city",
        "How far is it from {origin} to {destination}?"
        "|What is the distance between {origin} and {destination}?"
        "|Distance from {origin} to {destination}?|How many kilometers from {origin} to {destination}?"
        "|Tell me how far {origin} is from {destination}."
        "|Calculate the distance {origin} to {destination}.",
        "kilometers: int:20:9900",
        "It is {=kilometers} kilometers from {origin} to {destination}.",
    ),
    _entry(
        "create_user add_user user_create register_user",
        "Create a user account.|Add a user.",
        "name|username: name - Name of the user; email: email - Email of the user",
        "Create a user {name} with email {email}.|Add the user {name}, {email}."
        "|New account for {name}, email {email}."
        "|Please register {name} with {email}.|Make a user called {name} with the email {email}.",
        "user_id: id",
        "I created the user {name}. The user id is {=user_id}.",
    ),
    _entry(
        "reset_password password_reset",
        "Reset the password of a user.|Send a password reset.",
        "email|user|account: email - Email of the user",
        "Reset the password of {email}.|{email} forgot the password, reset it."
        "|Please reset the password for {email}."
        "|Send a password reset to {email}.|I need a new password for {email}.",
        "status: =sent; code: int:1000:9999",
        "The password of {email} was reset. The code is {=code}.",
    ),
    _entry(
        "get_news search_news news_search latest_news",
        "Get the latest news on a topic.|Search the news.",
        "topic|query|subject: word - The topic; limit?: int:1:10 - How many articles",
        "What is the news about {topic}?|Any news on {topic}?|Show me {limit} news articles about {topic}."
        "|Latest news on {topic}, please.|Search the news for {topic}."
        "|What is new about {topic} in the news?",
        "headline: phrase; source: name",
        "{=source} reports: {=headline}.",
        "And about {topic}?|What about {topic}?",
    ),
    _entry(
        "get_invoice lookup_invoice invoice_status find_invoice",
        "Look up an invoice.|Get the amount and state of an invoice.",
        "invoice_id|invoice|number: id - The invoice",
        "What is the amount of invoice {invoice_id}?|Is invoice {invoice_id} paid?"
        "|Look up invoice {invoice_id}."
        "|Show me the invoice {invoice_id}.|Check invoice {invoice_id} please."
        "|How much is invoice {invoice_id}?",
        "amount: number; status: state",
        "The invoice {invoice_id} is over {=amount} and is {=status}.",
        "And {invoice_id}?|What about invoice {invoice_id}?",
    ),
    _entry(
        "pay_invoice invoice_pay settle_invoice",
        "Pay an invoice.|Pay an invoice from an account.",
        "invoice_id|invoice|number: id - The invoice; account?: id - Account to pay from",
        "Pay invoice {invoice_id}.|Please pay the invoice {invoice_id}."
        "|Pay invoice {invoice_id} from account {account}."
        "|Settle invoice {invoice_id}, pay it.|I want to pay {invoice_id}.",
        "receipt: id; status: =paid",
        "The invoice {invoice_id} is paid. The receipt is {=receipt}.",
    ),
    _entry(
        "search_web web_search search",
        "Search the web.|Search the internet for a query.",
        "query|q|text: phrase - What to search for",
        "Search the web for {query}.|Look up {query} online.|Find {query} on the internet."
        "|Search for {query} on the web."
        "|What does the web say about {query}?|Do a web search: {query}.",
        "title: phrase; url: file",
        "The first result is {=title}.",
        "And {query}?|Now {query}.",
    ),
    _entry(
        "calculate calculator evaluate_expression multiply",
        "Multiply two numbers.|Calculate a product of two numbers.",
        "a|x|first: int:2:999 - First number; b|y|second: int:2:999 - Second number",
        "What is {a} times {b}?|Multiply {a} by {b}.|Calculate {a} times {b}.|How much is {a} times {b}?"
        "|{a} multiplied by {b} is what?|Compute {a} times {b} please.",
        "result: int:10:99999",
        "{a} times {b} is {=result}.",
    ),
)
